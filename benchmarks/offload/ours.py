"""Helios as a contestant, in a process of its own: ``python -m benchmarks.offload.ours JOB``."""

from collections.abc import Callable

import torch

from benchmarks.offload.protocol import Clock, Job, job_of_argument, own_bytes, run, say
from engine.llm import LLM
from engine.memory import available_bytes
from engine.request import Delta, SamplingParams
from engine.text.tokenizer import Tokenizer


def load(job: Job) -> Callable[[list[list[int]], Clock], list[list[int]]]:
    """The engine with all that the limit leaves beside this process and ``reserve_bytes``."""
    options = dict(job.options)
    left = min(job.limit_bytes - own_bytes(), available_bytes())
    memory = left - options.pop("reserve_bytes") - (options.get("host_bytes") or 0)
    llm = LLM(
        job.model,
        device="cpu",
        dtype="bfloat16",
        threads=job.threads,
        memory_bytes=memory,
        offload_dir=job.offload_dir,
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=job.n_tokens, ignore_eos=True)
    say("memory", budget_bytes=memory, held=llm.engine.stats().memory)

    def generate(ids: list[list[int]], clock: Clock) -> list[list[int]]:
        output: list[list[int]] = [[] for _ in ids]
        engine = llm.engine
        for prompt, into in zip(ids, output, strict=True):

            def deliver(delta: Delta, into: list[int] = into) -> None:
                if delta.error is not None:
                    raise delta.error
                into.extend(token.id for token in delta.tokens)

            engine.add(engine.prepare(llm.request(prompt, params), deliver))
        made = 0
        while engine.has_work:
            decoding = all(output)
            engine.step()
            made, before = sum(map(len, output)), made
            clock.made(made - before, decoding)
        return output

    return generate


def warm_up(job: Job) -> None:
    """So that the products' own buffers, threads and the tokenizer are in what is called the process's own."""
    torch.set_num_threads(job.threads)
    for rows in (1, 64):
        torch.nn.functional.linear(torch.ones(rows, 256).bfloat16(), torch.ones(256, 256).bfloat16())
    Tokenizer.load(__import__("pathlib").Path(job.model))


if __name__ == "__main__":
    given = job_of_argument()
    warm_up(given)
    run(given, load)
