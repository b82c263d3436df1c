#!/bin/bash
# A lifecycle rule for the bucket of --out s3://BUCKET/…: uploads that a dead worker left half done
# cost money and are listed nowhere; S3 drops them after three days. Nothing else expires: data,
# commits and manifests stay.
#
#   bash infra/s3-lifecycle.sh BUCKET
#
# Needs the aws command and the permission s3:PutLifecycleConfiguration. It replaces the bucket's
# other lifecycle rules: see them first with `aws s3api get-bucket-lifecycle-configuration`.
set -euo pipefail

bucket=${1:?usage: bash infra/s3-lifecycle.sh BUCKET}
rules=$(
  cat <<'JSON'
{
  "Rules": [
    {
      "ID": "drafter-features-unfinished-uploads",
      "Status": "Enabled",
      "Filter": {"Prefix": ""},
      "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 3}
    }
  ]
}
JSON
)
aws s3api put-bucket-lifecycle-configuration --bucket "$bucket" \
  --lifecycle-configuration "$rules"
