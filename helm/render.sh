#!/usr/bin/env bash
# helm/render.sh [DIR]: write what deploy/kubernetes has of the chart, for people without Helm. A test does it again and compares.
set -euo pipefail
cd "$(dirname "$0")/.."
to=${1:-deploy/kubernetes}
# Without what is said of a release; the policies do nothing until REGISTRY is replaced (a condition in them says so).
release='/helm.sh\/chart:/d;/app.kubernetes.io\/\(instance\|managed-by\|version\):/d'
render() { # render FILE TEMPLATE SETTING...
  local file=$1 template=$2; shift 2
  { echo "# Written by helm/render.sh."; helm template torchobs helm/torchobs --kube-version 1.36 --set image.tag=latest -s "templates/injection/$template" "$@" |
      sed -e '1{/^---$/d}' -e '/^# Source:/d' -e "$release"; } > "$to/$file"
}
render injection-policy.yaml policy.yaml --set image.repository=REGISTRY/torchobs-exporter,injection.apiVersion=v1
render injection-kyverno.yaml kyverno.yaml --set image.repository=REGISTRY/torchobs-exporter,injection.engine=kyverno
