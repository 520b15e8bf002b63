"""The attention block in TensorFlow: eagerly, in a graph and as a Keras layer, beside what Keras has in its place.

Without an environment that has TensorFlow (`make tf-env`), the record says that there is none.
"""

from __future__ import annotations

from stages._run import Stage, stage_main


def run(stage: Stage) -> None:
    """Write metrics/<machine>/bench_tf.json."""
    from tilerank.bench import tf_block
    from tilerank.machine import device_for

    settings = stage.settings
    python = tf_block.interpreter(stage.root)
    if python is None:
        reason = "there is no environment with TensorFlow: `make tf-env` makes one, TILERANK_TF_PYTHON names another's"
        record = {"available": False, "reason": reason}
    else:
        precisions = [precision for precision in settings.workload.precisions if precision in tf_block.TOLERANCES]
        on_cpu = device_for(settings.machine.name) == "cpu"
        record = tf_block.record_of(tf_block.run(python, stage.root, precisions, on_cpu))
    print(f"bench_tf: {tf_block.verdict(record)}")
    stage.write_metrics({"tensorflow": record})


if __name__ == "__main__":
    stage_main(run, belongs_to_machine=True)
