"""Kubeflow's MPI Operator: an MPIJob, whose launcher runs `trainer run` over ssh."""

from __future__ import annotations

from trainer.ops.submit.job import Job
from trainer.ops.submit.schedulers.base import fill
from trainer.ops.submit.schedulers.kubernetes import Kubernetes

_WORKER = """\
# The operator's key is the host's key, and the one that may log in. Options count before the file.
exec /usr/sbin/sshd -D -e -f /trainer/ssh/sshd_config -p 2222 -h /ssh/id_rsa \\
    -o AuthorizedKeysFile=/ssh/authorized_keys -o StrictModes=no \\
    -o HostKeyAlgorithms=ecdsa-sha2-nistp521 -o PubkeyAcceptedAlgorithms=ecdsa-sha2-nistp521 \\
    -o "SetEnv PATH=$PATH OPAL_PREFIX=$OPAL_PREFIX PYTHONUNBUFFERED=1"
"""
_LAUNCHER = """\
# Every worker has the operator's key as its host key, which is pinned here.
mkdir -p -m 700 ~/.ssh
sed 's/^/* /' /ssh/id_rsa.pub > ~/.ssh/known_hosts
printf '%s\\n' 'Port 2222' 'IdentityFile /ssh/id_rsa' 'UserKnownHostsFile ~/.ssh/known_hosts' \\
    'HostKeyAlgorithms ecdsa-sha2-nistp521' 'Include /trainer/ssh/ssh_config' > ~/.ssh/config
# The operator's hostfile has lines as in "{name}-worker-0.{name}.default.svc slots={ranks_per_node}".
hosts=$(sed 's/ slots=/:/' /etc/mpi/hostfile | paste -sd,)
# SIGTERM to trainer run has all ranks save. It starts them again after a failure.
exec trainer run {launcher}-np {ranks} -H "$hosts" --name {name} -- "$@"
"""
_TEMPLATE = """\
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata:
  name: "{name}"
  {namespace}
spec:
  # Ranks of each worker.
  slotsPerWorker: {ranks_per_node}
  # The operator makes a key pair for this job, in a Secret that only its pods mount.
  sshAuthMountPath: /ssh
  launcherCreationPolicy: WaitForWorkersReady
  runPolicy:
    cleanPodPolicy: Running
    # trainer run starts the ranks again by itself. This counts the launchers that were lost with their node.
    backoffLimit: {restarts}
    {deadline}
  mpiReplicaSpecs:
    Launcher:
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          {pod}
          containers:
          - name: launcher
            image: {image}
            command: [tini, --, bash, -c]
            args:
            - |
              {launcher}
            - launcher
            {arguments}
            {container}
    Worker:
      replicas: {nodes}
      restartPolicy: OnFailure
      template:
        spec:
          {pod}
          containers:
          - name: worker
            image: {image}
            command: [tini, --, bash, -c]
            args:
            - |
              {worker}
            readinessProbe: {tcpSocket: {port: 2222}}
            # A job that is ended early ends workers and launcher at once; the launcher has the ranks save first.
            lifecycle: {preStop: {exec: {command: [sleep, "{pause_s}"]}}}
            {resources}
            {container}
"""


class MPIJob(Kubernetes):
    """MPI Operator, v2beta1."""

    name = "mpijob"
    summary = "Kubernetes with Kubeflow's MPI Operator (v2beta1): Horovod or torchrun over ssh"
    product = "Kubeflow's MPI Operator"
    launchers = ("mpi", "gloo", "torchrun")
    proof = (
        "Not run on Kubernetes. It validates against the CRD of MPI Operator 0.8.2,\n"
        "and its containers have trained on 2026-11-22 with Docker (tests/docker/test_kubernetes.py)."
    )
    template = _TEMPLATE
    # The launcher prints what the ranks print.
    pods = "training.kubeflow.org/job-name={name},training.kubeflow.org/job-role=launcher"

    def parts(self, job: Job) -> dict[str, object]:
        """Return what goes into the template."""
        launcher = fill(
            _LAUNCHER, name=job.name, ranks_per_node=job.ranks_per_node, ranks=job.ranks, launcher=f"--{job.launcher} "
        )
        return {**super().parts(job), "launcher": launcher, "worker": _WORKER, "pause_s": min(30, job.grace_s)}
