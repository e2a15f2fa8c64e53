"""Kubeflow Trainer v2: a TrainingRuntime and a TrainJob, with torchrun in each pod."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.ops.submit.job import Job
from trainer.ops.submit.schedulers.kubernetes import Kubernetes, resources

_TEMPLATE = """\
# What the pods are like: volumes, user, restarts. Several TrainJobs may use one runtime.
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: "{name}"
  {namespace}
  labels: {trainer.kubeflow.org/framework: torch}
spec:
  # The operator sets PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and others, which torchrun reads.
  mlPolicy:
    numNodes: {nodes}
    torch: {}
  template:
    spec:
      # When a pod ends with an error, all are made again, and go on from the newest checkpoint. torchrun has one exit
      # code for all errors, so that a mistake in the script is tried as often.
      failurePolicy: {maxRestarts: {restarts}, restartStrategy: Recreate}
      replicatedJobs:
      - name: node
        template:
          metadata:
            # The job to which the TrainJob's command goes.
            labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}
          spec:
            backoffLimit: 0
            template:
              spec:
                restartPolicy: Never
                {pod}
                containers:
                - name: node
                  image: {image}
                  {container}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: "{name}"
  {namespace}
spec:
  runtimeRef: {apiGroup: trainer.kubeflow.org, kind: TrainingRuntime, name: "{name}"}
  {deadline}
  trainer:
    image: {image}
    numNodes: {nodes}
    numProcPerNode: {ranks_per_node}
    {resources}
    # --: torchrun would take the script's options for its own.
    command: [tini, --, torchrun, --no-python, --]
    args:
    {arguments}
"""


class TrainJob(Kubernetes):
    """Kubeflow Trainer, v1alpha1 of its v2."""

    name = "trainjob"
    summary = "Kubernetes with Kubeflow Trainer v2 (v1alpha1): torchrun in each pod"
    product = "Kubeflow Trainer v2"
    launchers = ("torchrun",)
    proof = (
        "Not run on Kubernetes. It validates against the CRDs of Kubeflow Trainer of 2026-08-21,\n"
        "and its containers have trained on 2026-11-22 with Docker (tests/docker/test_kubernetes.py)."
    )
    template = _TEMPLATE
    # Its JobSet has the name of the TrainJob.
    pods = "jobset.sigs.k8s.io/jobset-name={name}"

    def parts(self, job: Job) -> dict[str, object]:
        """Return what goes into the template."""
        return {**super().parts(job), "resources": resources(job).replace("resources:", "resourcesPerNode:")}

    def cancel_command(self, job_id: str) -> Sequence[str]:
        """Return the command that ends the job and deletes its runtime, whose name another submission needs."""
        name = job_id.split()[0].partition("/")[2]
        return (*super().cancel_command(job_id), f"trainingruntime.trainer.kubeflow.org/{name}")
