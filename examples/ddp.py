"""Train the small GPT on several ranks: DDP, a schedule, a log, and checkpoints from which a second start goes on.

    torchrun --nproc-per-node 2 examples/ddp.py runs/ddp --steps 20

It runs as a single process too: ``python examples/ddp.py runs/ddp``. ``ddp_raw.py`` is the same script in plain torch: a test holds
the two to a difference of six lines. The session clears gradients itself; the loop's own ``zero_grad()`` may stay.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from mpbackend.examples.gpt import GPT, Config, batches, corpus  # type: ignore[import-not-found] # the name that this folder has once it is installed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import mpbackend

CONFIG = Config(layers=1, heads=2, width=32, context=16, batch=8)
SAVE_EVERY = 5


def train(folder: Path, steps: int, total_steps: int) -> None:
    """Train up to step ``steps`` of a schedule over ``total_steps``, from the checkpoint in ``folder`` if there is one."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    checkpoint = folder / "checkpoint"
    segment = folder / f"start-{len(list(folder.glob('start-*')))}"
    device = torch.device("cpu") if accelerator is None else torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(1)
    model = GPT(CONFIG).to(device)
    model = DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=total_steps + 1)
    with mpbackend.select("auto").prepare(model, optimizer, "bf16", clip_norm=1.0, micro_batches=4, average=True, scheduler=scheduler, record=segment) as run:
        start = run.load(checkpoint)["step"] if checkpoint.exists() else 0
        data = islice(batches(corpus(), CONFIG, 4 * steps, seed=rank), 4 * start, None)
        for step in range(start + 1, steps + 1):
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            for inputs, wanted in islice(data, 4):
                with run.autocast():
                    loss = cross_entropy(model(inputs.to(device)).flatten(0, 1), wanted.to(device).flatten())
                losses.append(loss.detach())
                run.backward(loss)
                norm = run.step().grad_norm
            if rank == 0:
                row = {
                    "step": step,
                    "loss": float(torch.stack(losses).mean()),
                    "grad_norm": float(torch.as_tensor(norm)),
                    "lr": float(scheduler.get_last_lr()[0]),
                }
                write_row(segment / "log.jsonl", row)
            if step % SAVE_EVERY == 0:
                run.save(checkpoint, extra={"step": step})


def write_row(path: Path, row: dict[str, float]) -> None:
    """Append one JSON line to a log, of which each start of the script has its own."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    """Read the command line, train, and leave the other ranks in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--total-steps", type=int, default=20)
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:
        dist.init_process_group()
    train(chosen.folder, chosen.steps, chosen.total_steps)
    gc.collect()  # what still holds the process group goes before the group does
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
