"""Which variant, and which machine code, `auto` takes for the calls of the stages that run what it takes.

They depend on this record: it needs no GPU, so whether they are stale shows wherever there is an nvcc.
"""

from __future__ import annotations

from functools import cache

from stages._run import Stage, stage_main


def run(stage: Stage) -> None:
    """Write metrics/<machine>/choose_kernels.json."""
    from tqdm import tqdm

    from tilerank import kernel_choices, models
    from tilerank.bench import micro, tf_block
    from tilerank.kernels import registry
    from tilerank.machine import compute_capability

    settings = stage.settings
    sm = compute_capability(settings.machine.name)
    rows = registry.read_registry(registry.cuda_dir() / "registry.yaml")
    head_dim = models.head_dim(models.resolve(settings.model, stage.root).path)
    # Precision tf32 is fp32 tensors, for which `auto` takes what it takes for fp32.
    dtypes = [precision for precision in settings.workload.precisions if precision != "tf32"]
    own = {"bench_micro": micro.calls(on_cpu=not sm), "bench_tf": tf_block.calls(on_cpu=not sm)}
    with tqdm(desc="compiling what auto takes", unit="variant", disable=None) as bar:

        @cache
        def digest(row: registry.Row) -> str:
            bar.update()
            return kernel_choices.code_digest(row, sm)

        chosen = {
            name: kernel_choices.choices(
                of_stage,
                rows,
                variant="auto" if name in own else settings.kernel.variant,
                sm=sm,
                dtypes=dtypes,
                head_dim=head_dim,
                k_len=settings.workload.max_length,
                digest=digest,
            )
            for name, of_stage in {**kernel_choices.CALLS, **own}.items()
        }
    stage.write_metrics({"choices": chosen})


if __name__ == "__main__":
    stage_main(run)
