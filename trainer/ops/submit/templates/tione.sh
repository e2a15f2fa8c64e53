#!/bin/bash
# __nodes__ x __ranks_per_node__ ranks (nodes x ranks per node) for TI-ONE. It was written by
#
#     __made_by__
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
  "Name": "__name__",
  "ResourceGroupId": "__ResourceGroupId__",
  "VpcId": "__VpcId__",
  "SubnetId": "__SubnetId__",
  "ChargeType": "__charge_type__",
  "ResourceConfigInfos": [
    {
      "InstanceType": "__InstanceType__",
      "Cpu": __millicores__,
      "Memory": __memory_mib__,
      "Gpu": __gpu_hundredths__,
      "GpuType": "__GpuType__",
      "RDMAConfig": {"Enable": __RDMAConfig.Enable__},
      "Role": "WORKER",
      "InstanceNum": __nodes__
    }
  ],
  "TrainingMode": "DDP",
  "ImageInfo": {
    "ImageType": "__ImageType__",
    "RegistryRegion": "__RegistryRegion__",
    "RegistryId": "__RegistryId__",
    "ImageUrl": "__image__"
  },
  "DataSource": "__data_source__",
  "DataConfigs": [{"DataSourceType": "CFS", "MappingPath": "/trainer/runs", "CFSSource": {"Id": "__CFSSource.Id__", "Path": "__CFSSource.Path__"}}],
  "StartCmdInfo": {
    "StartCmd": "exec torchrun --nnodes __nodes__ --nproc-per-node __ranks_per_node__ --node-rank \"$RANK\" --master-addr \"$MASTER_ADDR\" --master-port \"$MASTER_PORT\" --log-dir runs/__name__ --tee 3 --no-python -- __command__"
  }
}
REQUEST
tccli tione CreateTrainingTask --version 2021-11-11 --cli-input-json "file://$request"
