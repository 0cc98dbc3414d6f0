"""The peers, each in a process of its own: ``python -m benchmarks.offload.peers JOB`` in the peers' environment."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.offload.protocol import Clock, Job, job_of_argument, run

Generate = Callable[[list[list[int]], Clock], list[list[int]]]


def generator(model: Any, n_tokens: int) -> Generate:
    """transformers' ``generate``, greedy, that notes every token."""
    import torch
    from transformers import StoppingCriteria

    class Note(StoppingCriteria):
        def __init__(self, clock: Clock) -> None:
            self.clock, self.decoding = clock, False

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            self.clock.made(len(input_ids), self.decoding)
            self.decoding = True
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def generate(ids: list[list[int]], clock: Clock) -> list[list[int]]:
        inputs = torch.tensor(ids)
        with torch.inference_mode():
            output = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=n_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[Note(clock)],
            )
        made: list[list[int]] = output[:, inputs.shape[1] :].tolist()
        return made

    return generate


def load_transformers(job: Job) -> Generate:
    """Plain transformers: the checkpoint mapped into memory, its pages read when a product touches them."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16, low_cpu_mem_usage=True).eval()
    return generator(model, job.n_tokens)


def load_accelerate(job: Job) -> Generate:
    """Accelerate: layers beyond ``max_memory`` stay on disk and are loaded by hooks before they compute."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        job.model,
        dtype=torch.bfloat16,
        device_map="auto",
        max_memory={"cpu": job.options["weight_bytes"]},
        offload_folder=job.offload_dir,
    ).eval()
    return generator(model, job.n_tokens)


def load_deepspeed(job: Job) -> Generate:
    """DeepSpeed ZeRO-Inference: stage 3, all weights on NVMe, layers brought in by asynchronous reads."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed as ds
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    config = AutoConfig.from_pretrained(job.model)
    largest = config.vocab_size * config.hidden_size
    settings = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {
                "device": "nvme",
                "nvme_path": job.offload_dir,
                "pin_memory": False,
                "buffer_count": 5,
                "buffer_size": largest,
                "max_in_cpu": 0,
            },
            "stage3_max_live_parameters": 4 * 12 * config.hidden_size**2,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 2 * 12 * config.hidden_size**2,
            "stage3_param_persistence_threshold": config.hidden_size,
        },
        "aio": {"block_size": 4 * 2**20, "queue_depth": 16, "single_submit": False, "overlap_events": True},
    }
    ds.init_distributed("gloo", rank=0, world_size=1, init_method=f"file://{job.offload_dir}/rendezvous")
    keep = HfDeepSpeedConfig(settings)  # from here on models are made in pieces, on disk
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    stored = {
        name: file
        for file in map(str, Path(job.model).glob("*.safetensors"))
        for name in safe_open(file, "pt").keys()  # noqa: SIM118
    }
    for name, parameter in model.named_parameters():
        with ds.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.copy_(safe_open(stored[name], "pt").get_tensor(name))
    engine = ds.initialize(model=model, config_params=settings)[0]
    engine.module.eval()
    generate = generator(engine.module, job.n_tokens)

    def kept(ids: list[list[int]], clock: Clock) -> list[list[int]]:
        assert keep is not None, "transformers asks for it as long as it lives"
        return generate(ids, clock)

    return kept


def warm_up(job: Job) -> None:
    """Generate with a tiny model of the same family, so that all code and buffers are in the process's base."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family = AutoConfig.from_pretrained(job.model).model_type
    sizes = {"hidden_size": 64, "ffn_dim": 64, "intermediate_size": 64, "word_embed_proj_dim": 64, "vocab_size": 64}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = AutoConfig.for_model(family, **sizes, **heads)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.ones(1, 8, dtype=torch.int64)
    model.generate(ids, attention_mask=ids, max_new_tokens=2, do_sample=False, pad_token_id=0)


LOADERS = {"transformers": load_transformers, "accelerate": load_accelerate, "deepspeed": load_deepspeed}


def main() -> None:
    job = job_of_argument()
    import torch

    torch.set_num_threads(job.threads)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    if job.contestant == "deepspeed":
        import deepspeed  # noqa: F401
    warm_up(job)
    run(job, LOADERS[job.contestant])


if __name__ == "__main__":
    main()
