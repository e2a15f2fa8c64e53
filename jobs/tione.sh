#!/bin/bash
# Creates a training task of Tencent's TI-ONE. Not run: it follows the documentation of the API of 2021-11-11.
# Fill in the fields below, then: bash jobs/tione.sh. Check first whether
# - `tccli configure` has your account and region, and `tccli tione DescribeTrainingTasks` answers;
# - the task shows the image, the mode DDP and the command in the console, before it takes many GPUs;
# - the command runs in the image's own folder, can write to runs/ there, and has a /dev/shm of 64 MB for each rank;
# - stopping the task sends SIGTERM to torchrun some seconds before it is killed. Else only --checkpoint-every saves.
# There is no time limit and no queue to go back into: a task that has ended is created again, and goes on.

set -eu
command -v tccli > /dev/null || {
    echo "tccli is not installed here; submit where it is" >&2
    exit 1
}
request=$(mktemp)
trap 'rm -f "$request"' EXIT
# StartCmd runs on each node. TI-ONE sets MASTER_ADDR and MASTER_PORT, and RANK to the number of the node.
# Cpu counts thousandths of a core, Memory MB, Gpu hundredths of a GPU: of each of InstanceNum nodes. A task that is
# paid by the hour has "ChargeType": "POSTPAID_BY_HOUR" and an InstanceType in place of ResourceGroupId, Cpu and Memory.
cat > "$request" << 'REQUEST'
{
  "Name": "train",
  "ResourceGroupId": "rsg-example",
  "ChargeType": "PREPAID",
  "ResourceConfigInfos": [{"Role": "WORKER", "InstanceNum": 2, "Cpu": 8000, "Memory": 32768}],
  "TrainingMode": "DDP",
  "ImageInfo": {"ImageType": "CCR", "ImageUrl": "ccr.ccs.tencentyun.com/example/trainer:1"},
  "DataSource": "CFS",
  "DataConfigs": [
    {"DataSourceType": "CFS", "MappingPath": "/trainer/runs", "CFSSource": {"Id": "cfs-example", "Path": "/runs"}}
  ],
  "StartCmdInfo": {
    "StartCmd": "exec torchrun --nnodes 2 --nproc-per-node 2 --node-rank \"$RANK\" --master-addr \"$MASTER_ADDR\" --master-port \"$MASTER_PORT\" --log-dir runs/train --tee 3 --no-python -- python train.py --checkpoint runs/saved"
  }
}
REQUEST
tccli tione CreateTrainingTask --version 2021-11-11 --cli-input-json "file://$request"
