"""What every process of `hybrid doctor` runs: it measures, and leaves the values in the run folder."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from hybrid_strategy.files import write_json
from hybrid_strategy.measure.kernels import kernel_rates
from hybrid_strategy.measure.links import link_rates

RATES_FILE = "rates.json"


def run(run_dir: Path) -> None:
    """Kernels of all processes at the same time, then the links between them; the median process counts."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    import lightning.pytorch  # noqa: F401  (what a training process holds before its model)

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    dist.barrier()
    mine = {**kernel_rates(device), "held_bytes": held}
    if on_gpu:
        free, total = torch.cuda.mem_get_info(device)
        mine |= {"memory_bytes": float(total), "reserve_bytes": float(total - free - torch.cuda.memory_reserved(device))}
    box: list[dict[str, float] | None] = [None] * world
    dist.all_gather_object(box, mine)
    links = link_rates(device) if world > 1 else {}
    if rank == 0:
        ranks = [each for each in box if each is not None]
        write_json(run_dir / RATES_FILE, {name: median(each[name] for each in ranks) for name in mine} | links)
    dist.destroy_process_group()
