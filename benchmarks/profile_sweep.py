"""Where the time of decode sweeps goes, by torch's profiler."""

import time

from torch.profiler import ProfilerActivity, profile

from engine.llm import LLM
from engine.request import Delta, SamplingParams

PARTS = ("products", "attention", "norms, rotation, activation", "sampling", "rest")
_SWEEPS = 10
_OPS = {
    "aten::mm": "products",
    "aten::addmm": "products",
    "mkldnn::_linear_pointwise": "products",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::bmm": "attention",
    "aten::baddbmm": "attention",
    "aten::_softmax": "attention",
    "aten::index_select": "attention",
    "aten::index_copy_": "attention",
}


def profile_decode(llm: LLM, prompts: list[list[int]]) -> dict[str, float]:
    """Milliseconds of a decode sweep over ``prompts`` spent in each of PARTS; they add up to the wall time.

    Shares are taken under the profiler and scaled to the wall time of sweeps that run without it.
    """
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=5 * _SWEEPS, ignore_eos=True)
    begun: list[Delta] = []
    for prompt in prompts:
        engine.add(engine.prepare(llm.request(prompt, params), begun.append))
    while len({delta.request_id for delta in begun}) < len(prompts):
        engine.step()
    start = time.perf_counter()
    for _ in range(_SWEEPS):
        engine.step()
    wall_ms = (time.perf_counter() - start) / _SWEEPS * 1e3
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        since = time.perf_counter()
        for _ in range(_SWEEPS // 2):
            engine.step()
        total_us = (time.perf_counter() - since) * 1e6
    while engine.has_work:
        engine.step()
    spent = dict.fromkeys(PARTS, 0.0)
    events = profiled.key_averages()
    for event in events:
        if event.key in _OPS:
            spent[_OPS[event.key]] += event.self_cpu_time_total
        elif event.key == "helios::sample":
            spent["sampling"] += event.cpu_time_total
        elif event.key in ("aten::rms_norm", "aten::layer_norm", "aten::silu", "aten::roll", "aten::addcmul_"):
            spent["norms, rotation, activation"] += event.cpu_time_total
    spent["rest"] = total_us - sum(spent.values())
    return {part: us / total_us * wall_ms for part, us in spent.items()}
