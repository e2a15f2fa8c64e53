#!/bin/bash
# 2 x 2 ranks (nodes x ranks per node) for TI-ONE. It was written by
#
#     trainer submit tione --nodes 2 --ranks-per-node 2 --cpus-per-rank 4 --memory 32GB --image ccr.ccs.tencentyun.com/example/trainer:1 --directive=ResourceGroupId=rsg-example --directive=ImageType=CCR --directive=CFSSource.Id=cfs-example --directive=CFSSource.Path=/runs -- python examples/mnist.py --checkpoint runs/checkpoints
#
# and is submitted, where that has not done it, by: bash THIS-FILE
# Not run: no TI-ONE was at hand. It follows the documentation of the API of 2021-11-11. Check first whether
# - `tccli configure` has your account and region, and `tccli tione DescribeTrainingTasks` answers;
# - the task shows the image, the mode DDP and the command in the console, before it takes many GPUs. Where the
#   command is refused for its characters, the API takes EncodedStartCmdInfo, its JSON in base64;
# - the command runs in the image's own folder, can write to runs/ there, and has a /dev/shm of 64 MB for each rank;
# - stopping the task sends SIGTERM to torchrun some seconds before it is killed. Else only --checkpoint-every saves.

set -eu
command -v tccli > /dev/null || {
    echo "tccli is not installed here; submit where it is" >&2
    exit 1
}
request=$(mktemp)
trap 'rm -f "$request"' EXIT
# StartCmd runs on each node. TI-ONE sets MASTER_ADDR and MASTER_PORT, and RANK to the number of the node.
# Cpu counts thousandths of a core, Memory MB, Gpu hundredths of a GPU: of each of InstanceNum nodes.
cat > "$request" << 'REQUEST'
{
  "Name": "mnist",
  "ResourceGroupId": "rsg-example",
  "ChargeType": "PREPAID",
  "ResourceConfigInfos": [
    {
      "Cpu": 8000,
      "Memory": 32768,
      "Role": "WORKER",
      "InstanceNum": 2
    }
  ],
  "TrainingMode": "DDP",
  "ImageInfo": {
    "ImageType": "CCR",
    "ImageUrl": "ccr.ccs.tencentyun.com/example/trainer:1"
  },
  "DataSource": "CFS",
  "DataConfigs": [{"DataSourceType": "CFS", "MappingPath": "/trainer/runs", "CFSSource": {"Id": "cfs-example", "Path": "/runs"}}],
  "StartCmdInfo": {
    "StartCmd": "exec torchrun --nnodes 2 --nproc-per-node 2 --node-rank \"$RANK\" --master-addr \"$MASTER_ADDR\" --master-port \"$MASTER_PORT\" --log-dir runs/mnist --tee 3 --no-python -- python examples/mnist.py --checkpoint runs/checkpoints"
  }
}
REQUEST
tccli tione CreateTrainingTask --version 2021-11-11 --cli-input-json "file://$request"
