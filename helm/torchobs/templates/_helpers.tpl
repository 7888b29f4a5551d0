{{- define "torchobs.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Beginning of the names of objects: the release's, with the chart's where that says more. */}}
{{- define "torchobs.fullname" -}}
{{- $name := include "torchobs.name" . -}}
{{- $release := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $release .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "torchobs.selectorLabels" -}}
app.kubernetes.io/name: {{ include "torchobs.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of an object: {root: the chart's scope, labels: those of its own}, the last word being the object's. */}}
{{- define "torchobs.labels" -}}
{{- $root := .root -}}
{{- $ours := dict "app.kubernetes.io/part-of" "torchobs" "app.kubernetes.io/managed-by" $root.Release.Service -}}
{{- $_ := set $ours "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-") -}}
{{- $_ = set $ours "app.kubernetes.io/version" $root.Chart.AppVersion -}}
{{- $selector := include "torchobs.selectorLabels" $root | fromYaml -}}
{{- merge (dict) (default (dict) .labels) $root.Values.additionalLabels $selector $ours | toYaml -}}
{{- end -}}

{{/* `imagePullSecrets` of the chart's own pods. */}}
{{- define "torchobs.imagePullSecrets" -}}
{{- include "torchobs.pullSecretList" .Values.image.pullSecrets -}}
{{- end -}}

{{/* A list for `imagePullSecrets`: names are made objects. */}}
{{- define "torchobs.pullSecretList" -}}
{{- $secrets := list -}}
{{- range . -}}
{{- $secrets = append $secrets (ternary (dict "name" .) . (kindIs "string" .)) -}}
{{- end -}}
{{- with $secrets }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{- define "torchobs.namespace.podMonitor" -}}
{{- default .Release.Namespace .Values.podMonitor.namespace -}}
{{- end -}}

{{/* A duration in whole seconds. */}}
{{- define "torchobs.seconds" -}}
{{- $zero := toDate "2006" "2000" -}}
{{- sub ($zero | dateModify (print "+" .) | unixEpoch | int64) ($zero | unixEpoch | int64) -}}
{{- end -}}

{{/* Nothing; fails where Prometheus would refuse the scrape, its operator without a word. */}}
{{- define "torchobs.checkedTimes" -}}
{{- with .Values.podMonitor -}}
{{- if or (eq (include "torchobs.seconds" .interval) "0") (gt (include "torchobs.seconds" .scrapeTimeout | int64) (include "torchobs.seconds" .interval | int64)) -}}
{{- fail (printf "podMonitor.scrapeTimeout is %s, and must not be longer than podMonitor.interval, %s" .scrapeTimeout .interval) -}}
{{- end -}}
{{- $needed := add (include "torchobs.seconds" .interval) (include "torchobs.seconds" .scrapeTimeout) 5 -}}
{{- $grace := int64 $.Values.injection.terminationGracePeriodSeconds -}}
{{- if and (ne $.Values.injection.engine "none") (lt $grace $needed) -}}
{{- fail (printf "pods get %d s to end (injection.terminationGracePeriodSeconds), and a last scrape may take %d s (podMonitor.interval, scrapeTimeout, and 5 s): how runs end would not be seen. Set injection.terminationGracePeriodSeconds to %d, or a shorter podMonitor.interval" $grace $needed $needed) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A quantity (`64Mi`, `0.5`) as a number. */}}
{{- define "torchobs.quantity" -}}
{{- $units := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- if kindIs "string" . -}}
{{- mulf (regexFind "^[0-9.]+" . | float64) (get $units (regexFind "[A-Za-z]+$" .) | default 1.0) -}}
{{- else }}{{ . }}{{ end -}}
{{- end -}}

{{- define "torchobs.sidecar.resources" -}}
{{- with .Values.injection -}}
{{- $limits := .resources.limits -}}
{{- range $name, $request := .resources.requests -}}
{{- $limit := get $limits $name | default $request -}}
{{- if gt (include "torchobs.quantity" $request | float64) (include "torchobs.quantity" $limit | float64) -}}
{{- fail (printf "injection.resources.requests.%s is %v, above limits.%s, %v: Kubernetes would refuse every pod with a sidecar" $name $request $name $limit) -}}
{{- end -}}
{{- end -}}
requests: {{ .resources.requests | toJson }}
limits: {{ .resources.limits | toJson }}
{{- end -}}
{{- end -}}

{{/* The class Guaranteed asks for a limit of both, and for requests as large: a limit that is not given is the request. */}}
{{- define "torchobs.guaranteedResources" -}}
{{- $limits := dict -}}
{{- range $name, $request := .Values.injection.resources.requests }}{{ $_ := set $limits $name $request }}{{ end -}}
{{- range $name, $limit := .Values.injection.resources.limits }}{{ if $limit }}{{ $_ := set $limits $name $limit }}{{ end }}{{ end -}}
requests: {{ toJson $limits }}
limits: {{ toJson $limits }}
{{- end -}}

{{/* "true" if the values say how long the exporter waits for the last scrape; else it is the pod's grace, less 5 s. */}}
{{- define "torchobs.hasOwnDrainTimeout" -}}
{{- range .Values.injection.env }}{{ if eq .name "TORCHOBS_EXPORTER_DRAIN_TIMEOUT" }}true{{ end }}{{ end -}}
{{- end -}}

{{/* Environment of the sidecar for the push, empty without an endpoint. A missing Secret never holds up a training. */}}
{{- define "torchobs.otlp.env" -}}
{{- with .Values.otlp -}}
{{- if .endpoint -}}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ .endpoint | quote }}}
- {name: OTEL_EXPORTER_OTLP_PROTOCOL, value: {{ .protocol }}}
- {name: OTEL_EXPORTER_OTLP_COMPRESSION, value: gzip}
- {name: OTEL_METRICS_EXPORTER, value: {{ ternary "otlp" "none" .metrics }}}
- {name: OTEL_TRACES_EXPORTER, value: {{ ternary "otlp" "none" .traces }}}
- {name: OTEL_LOGS_EXPORTER, value: {{ ternary "otlp" "none" .logs }}}
{{- if .resourceAttributes }}
{{- $pairs := list }}
{{- range $key, $value := .resourceAttributes }}{{ $pairs = append $pairs (printf "%s=%s" $key ($value | urlquery | replace "+" "%20")) }}{{ end }}
- {name: OTEL_RESOURCE_ATTRIBUTES, value: {{ join "," $pairs | quote }}}
{{- end }}
{{- with .headersSecret }}
{{- if .name }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom:
    secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}, optional: true}
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* `env` of the sidecar: which pod it is of, the push, and what the values add. */}}
{{- define "torchobs.sidecar.env" -}}
- {name: POD_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}
{{- $otlp := include "torchobs.otlp.env" . | fromYamlArray -}}
{{- with concat $otlp .Values.injection.env }}
{{ toYaml . }}
{{- end -}}
{{- end -}}

{{/* Version of the API of MutatingAdmissionPolicies: the value's, the newest that the cluster serves, or nothing. */}}
{{- define "torchobs.policyVersion" -}}
{{- $served := "" -}}
{{- range list "v1alpha1" "v1beta1" "v1" -}}
{{- if $.Capabilities.APIVersions.Has (printf "admissionregistration.k8s.io/%s/MutatingAdmissionPolicy" .) }}{{ $served = . }}{{ end -}}
{{- end -}}
{{- .Values.injection.apiVersion | default $served -}}
{{- end -}}

{{/* Version of the API of Kyverno's MutatingPolicies: the newest that the cluster serves, or nothing. */}}
{{- define "torchobs.servedKyvernoVersion" -}}
{{- $served := "" -}}
{{- range list "v1alpha1" "v1beta1" "v1" -}}
{{- if $.Capabilities.APIVersions.Has (printf "policies.kyverno.io/%s/MutatingPolicy" .) }}{{ $served = . }}{{ end -}}
{{- end -}}
{{- $served -}}
{{- end -}}

{{/* The value's version, or what is served; `helm template` asks no cluster, and gets Kyverno 1.17's. */}}
{{- define "torchobs.kyvernoVersion" -}}
{{- .Values.injection.apiVersion | default (include "torchobs.servedKyvernoVersion" .) | default "v1" -}}
{{- end -}}

{{/*
What heeds the label `torchobs.io/inject`: `policy`, `kyverno` or `none`. `auto` is the policy where the cluster serves it, else
Kyverno's where that is there. Fails where the label would do nothing without a word.
*/}}
{{- define "torchobs.engine" -}}
{{- $engine := .Values.injection.engine -}}
{{- $hasPolicy := include "torchobs.policyVersion" . -}}
{{- if and (eq $engine "auto") (not $hasPolicy) (include "torchobs.servedKyvernoVersion" .) -}}
{{- $engine = "kyverno" -}}
{{- else if eq $engine "auto" -}}
{{- $engine = "policy" -}}
{{- end -}}
{{- if and (eq $engine "policy") (not $hasPolicy) (not .Values.helpersOnly) -}}
{{- fail "this cluster serves no MutatingAdmissionPolicy (Kubernetes 1.36; before, the feature gate of this name and --runtime-config), so the label torchobs.io/inject would do nothing: set injection.engine to kyverno or none. Without a cluster (`helm template`, GitOps): injection.apiVersion=v1" -}}
{{- end -}}
{{- $engine -}}
{{- end -}}

{{/* "true" if the cluster is known and serves none of these kinds: `helm template` asks no cluster. */}}
{{- define "torchobs.lacks" -}}
{{- $apis := .root.Capabilities.APIVersions -}}
{{- if and ($apis.Has "v1/Pod") (not ($apis.Has .kind)) }}true{{ end -}}
{{- end -}}

{{/* `{root, value, kind}`: "true" if an object is wanted: `value` is true, or `auto` and the cluster has its kind. */}}
{{- define "torchobs.wanted" -}}
{{- if eq (toString .value) "auto" -}}
{{- if not (include "torchobs.lacks" .) }}true{{ end -}}
{{- else if .value }}true{{ end -}}
{{- end -}}

{{- define "torchobs.hasPodMonitor" -}}
{{- include "torchobs.wanted" (dict "root" . "value" .Values.podMonitor.enabled "kind" "monitoring.coreos.com/v1/PodMonitor") -}}
{{- end -}}

{{- define "torchobs.hasPrometheusRule" -}}
{{- include "torchobs.wanted" (dict "root" . "value" .Values.prometheusRule.enabled "kind" "monitoring.coreos.com/v1/PrometheusRule") -}}
{{- end -}}
