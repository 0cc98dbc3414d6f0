"""A configuration with what its plan decides."""

import logging
from dataclasses import replace
from pathlib import Path

from ..config import EngineConfig
from ..device import open_device
from ..errors import ConfigError
from ..quant.format import Quantisation
from ..spec import ModelSpec
from .job import Job
from .plan import Plan
from .planner import make_plan
from .profile.identity import why_stale
from .profile.store import stored_profile
from .task import Task

AUTO = "auto"
LONGEST = 2048
"""Positions that a request is planned for where no context is given."""

log = logging.getLogger(__name__)


def planned(config: EngineConfig, spec: ModelSpec, quantisation: Quantisation | None) -> EngineConfig:
    """The configuration with its plan's settings, where it leaves a default itself.

    Raises ConfigError for a plan that cannot be read, and for "auto" on a machine that was not measured; as
    ``planner.make_plan`` where nothing fits. What a file asks for too much of is refused when memory is divided.
    """
    if config.plan is None:
        return config
    default = EngineConfig(model=config.model)
    plan = _own(config, spec, quantisation) if config.plan == AUTO else Plan.load(Path(config.plan).expanduser())
    bits = quantisation.scheme.bits if quantisation else None
    if plan.quantize not in (None, bits):
        raise ConfigError(
            f"the plan {config.plan} is for a copy in {plan.quantize} bits and '{config.model}' is in {bits or 16}; "
            "make the copy with `helios quantize`, or plan without --quantize"
        )
    if config.plan != AUTO and plan.model != config.model:
        log.warning("the plan %s was made for '%s'; it is used for '%s'", config.plan, plan.model, config.model)
    log.info("plan: %s", plan.summary())
    left = {name: value for name, value in plan.settings.items() if getattr(config, name) == getattr(default, name)}
    return replace(config, plan=None, **left).validate()


def _own(config: EngineConfig, spec: ModelSpec, quantisation: Quantisation | None) -> Plan:
    """A plan for this machine."""
    hardware = stored_profile()
    if hardware is None:
        raise ConfigError("plan is 'auto' and this machine has not been measured; run `helios profile` first")
    if stale := why_stale(hardware):
        log.warning("the plan may not be the best: %s", stale)
    context = min(config.context or LONGEST, spec.max_positions)
    gen_len = max(1, context // 4)
    return make_plan(
        Task(
            model=config.model,
            spec=spec.cut(config.depth) if config.depth else spec,
            hardware=hardware,
            job=Job(max(1, context - gen_len), gen_len, config.max_sequences),
            dtype=open_device(config).dtype,
            quantisation=quantisation,
            memory_bytes=config.memory_bytes,
            host_bytes=config.host_bytes,
            disk_bytes=config.disk_bytes,
            kv_int4=config.kv_dtype == "int4",
            read_ahead=config.read_ahead,
        )
    )
