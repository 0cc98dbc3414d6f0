"""What is to be planned."""

from dataclasses import dataclass, replace

import torch

from ..budget import HEADROOM
from ..config import EngineConfig
from ..errors import ConfigError
from ..quant.format import Quantisation
from ..sizes import Sizes
from ..spec import ModelSpec
from .hardware import Hardware
from .job import Job
from .simulator.run import Simulation


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be planned."""

    model: str
    spec: ModelSpec
    hardware: Hardware
    job: Job
    dtype: torch.dtype
    quantisation: Quantisation | None = None
    memory_bytes: int | None = None
    """On the device; None is what the machine can spare. Likewise the other two."""
    host_bytes: int | None = None
    disk_bytes: int | None = None
    latency_limit_s: float | None = None
    """Until the last token of a block."""
    kv_int4: bool = False
    """KV may be kept in 4 bits."""
    read_ahead: bool = True
    depth: int | None = None
    """The exit at which ``spec`` was cut, for the configuration."""
    stages: int = 1
    """Machines that each take an equal part of the layers, with as many blocks on their way through them."""

    def validate(self) -> "Task":
        """Return self; raises ConfigError naming the value and the limit."""
        self.job.validate(self.spec)
        if not 1 <= self.stages <= self.spec.n_layers:
            raise ConfigError(f"stages is {self.stages}; this model's {self.spec.n_layers} layers make 1 to as many")
        return self

    @property
    def stage(self) -> ModelSpec:
        """The layers of the longest stage, taken to have the embedding and the head as well."""
        return self.spec.cut(-(-self.spec.n_layers // self.stages))

    @property
    def sizes(self) -> Sizes:
        """Of that stage."""
        return Sizes(self.stage, self.dtype, self.quantisation)

    def throughput(self, simulation: Simulation) -> float:
        """Tokens a second of the whole job, from one block's way through one stage.

        Every stage does as many blocks as there are stages in turn; the first is done by all when the last has passed
        once more."""
        full = self.fullness(simulation.tokens // self.job.gen_len)
        if self.stages == 1:
            return full * simulation.throughput
        per_sweep_s = simulation.decode_s / max(1, self.job.gen_len - 1)
        total_s = self.stages * simulation.total_s + (self.stages - 1) * per_sweep_s
        return full * self.stages * simulation.tokens / total_s

    def fullness(self, sequences: int) -> float:
        """Share of the places that are taken if the job is done so many sequences at a time: a last block that is not
        full is taken to last as long as the others."""
        return self.job.n_sequences / (-(-self.job.n_sequences // sequences) * sequences)

    def block(self, config: EngineConfig) -> Job:
        """The job of one block; of two where the next one's sequences take the place of those that end."""
        n_sequences = config.max_sequences * (2 if config.schedule == "diagonal" else 1)
        return replace(self.job, n_sequences=min(n_sequences, self.job.n_sequences))

    def base(self) -> EngineConfig:
        """The configuration that plans vary."""
        hardware = self.hardware
        host = self.host_bytes or (int(hardware.host_bytes * HEADROOM) if hardware.separate else None)
        return EngineConfig(
            model=self.model,
            dtype=str(self.dtype).removeprefix("torch."),
            memory_bytes=self.memory_bytes or int(hardware.device_bytes * HEADROOM),
            host_bytes=host,
            disk_bytes=self.disk_bytes or int(hardware.disk_bytes * HEADROOM) or None,
            context=self.job.context,
            depth=self.depth,
            read_ahead=self.read_ahead,
        )
