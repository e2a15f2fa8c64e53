"""JobSet: one job of as many pods as nodes, with torchrun in each."""

from __future__ import annotations

from trainer.ops.submit.schedulers.kubernetes import Kubernetes

_TEMPLATE = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: "{name}"
  {namespace}
spec:
  # When a pod ends with an error, all are made again, and go on from the newest checkpoint. torchrun has one exit code
  # for all errors, so that a mistake in the script is tried as often.
  failurePolicy:
    maxRestarts: {restarts}
    restartStrategy: Recreate
    # The time limit is that of a start, and ends the whole job.
    rules: [{name: timeLimit, action: FailJobSet, onJobFailureReasons: [DeadlineExceeded]}]
  # Pods find one another by name, before they are ready as well.
  network: {enableDNSHostnames: true, publishNotReadyAddresses: true}
  replicatedJobs:
  - name: node
    replicas: 1
    template:
      spec:
        # A pod for each node; JOB_COMPLETION_INDEX is its number.
        completionMode: Indexed
        completions: {nodes}
        parallelism: {nodes}
        backoffLimit: 0
        {deadline}
        template:
          spec:
            restartPolicy: Never
            {pod}
            containers:
            - name: node
              image: {image}
              command: [tini, --, bash, -c]
              args:
              - |
                exec torchrun --nnodes {nodes} --nproc-per-node {ranks_per_node} --node-rank "$JOB_COMPLETION_INDEX" \\
                    --master-addr {name}-node-0-0.{name} --master-port 29500 --no-python -- "$@"
              - node
              {arguments}
              {resources}
              {container}
"""


class JobSet(Kubernetes):
    """JobSet, v1alpha2."""

    name = "jobset"
    summary = "Kubernetes with JobSet (v1alpha2): torchrun in each pod"
    product = "JobSet"
    launchers = ("torchrun",)
    proof = (
        "Not run on Kubernetes. It validates against the CRD of JobSet of 2026-08-18,\n"
        "and its containers have trained on 2026-11-22 with Docker (tests/docker/test_kubernetes.py)."
    )
    template = _TEMPLATE
    pods = "jobset.sigs.k8s.io/jobset-name={name}"
