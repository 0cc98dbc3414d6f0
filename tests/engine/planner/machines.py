"""Machines and models for planning, small and round."""

from typing import Any

from engine.planner.hardware import Hardware
from engine.planner.processor import Curve, Processor
from engine.spec import ModelSpec

GIB = 2**30


def flat(rate: float) -> Curve:
    return Curve(((1.0, rate),))


def processor(**changes: Any) -> Processor:
    values: dict[str, Any] = {
        "products": {"bfloat16": Curve(((1.0, 2e10), (64.0, 4e11))), "int4": flat(4e10)},
        "decode_attention": flat(5e9),
        "chunk_attention": flat(1e11),
        "memory_bytes_s": 2e10,
        "expand_elements_s": 2e9,
        "layer_s": 1e-4,
        "sweep_s": 1e-3,
    }
    return Processor(**{**values, **changes})


def laptop(**changes: Any) -> Hardware:
    """Cores, 8 GiB and a disk."""
    values: dict[str, Any] = {
        "name": "laptop",
        "description": "cores and a disk",
        "device": processor(),
        "device_bytes": 8 * GIB,
        "disk_bytes": 100 * GIB,
        "disk_read": 1e9,
        "disk_write": 5e8,
        "disk_latency_s": 1e-4,
    }
    return Hardware(**{**values, **changes})


def workstation(**changes: Any) -> Hardware:
    """A GPU of 8 GiB, a host of 32 and a disk."""
    gpu = processor(products={"bfloat16": Curve(((1.0, 2e11), (512.0, 5e13)))}, decode_attention=flat(2e11))
    values: dict[str, Any] = {"device": gpu, "host": processor(), "host_bytes": 32 * GIB}
    return laptop(**{"name": "workstation", "to_device": 1e10, "to_host": 8e9, **values, **changes})


def llama(n_layers: int = 4, hidden: int = 256, **changes: Any) -> ModelSpec:
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": n_layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    return ModelSpec.from_config({**config, **changes})
