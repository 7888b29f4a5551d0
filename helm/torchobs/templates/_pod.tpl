{{/*
What torchobs adds to a pod, described once: the admission policy, Kyverno's and `torchobs.podSpec` are made of these.
deploy/kubernetes/job-with-sidecar.yaml is the same by hand; a test compares them all.
*/}}

{{- define "torchobs.image" -}}
{{- $image := .Values.image -}}
{{- if not $image.repository -}}
{{- fail "image.repository is not set. It is the exporter's image, which no public registry has: build it (deploy/image/build), push it, and give --set image.repository=REGISTRY/torchobs-exporter. A pod whose sidecar cannot be pulled never starts, so there is no default" -}}
{{- end -}}
{{ $image.repository }}{{ if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{/* The exporter, without its ports: a pod on the node's network must not claim one, or only one such pod fits a node. */}}
{{- define "torchobs.sidecarWithoutPorts" -}}
name: torchobs
image: {{ include "torchobs.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
restartPolicy: Always
resources:
  {{- include "torchobs.sidecar.resources" . | nindent 2 }}
env:
  {{- include "torchobs.sidecar.env" . | nindent 2 }}
securityContext:
  {{- include "torchobs.restricted" . | nindent 2 }}
volumeMounts:
  {{- include "torchobs.noToken" . | nindent 2 }}
  - {name: torchobs-flight, mountPath: /var/run/torchobs/flight, readOnly: true}
  - {name: torchobs-control, mountPath: /var/run/torchobs/control}
{{- end }}

{{- define "torchobs.ports" -}}
- {name: torchobs, containerPort: {{ .Values.injection.port }}}
{{- end }}

{{/* Kubernetes mounts the service account's token into each container that has nothing at this path. */}}
{{- define "torchobs.noToken" -}}
- {name: torchobs-no-token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end }}

{{/* The user of our containers where the pod's is root; the image's own. */}}
{{- define "torchobs.user" -}}65532{{- end }}

{{/* Secrets for the exporter's image in a training's pod. */}}
{{- define "torchobs.injection.pullSecrets" -}}
{{- include "torchobs.pullSecretList" .Values.injection.imagePullSecrets -}}
{{- end }}

{{/* Labels of a pod with the sidecar: the PodMonitor and the scrape configuration select them. */}}
{{- define "torchobs.podLabels" -}}
torchobs: sidecar
{{- end }}

{{/* Pod Security `restricted` asks for these where the pod itself does not say them. */}}
{{- define "torchobs.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* For `torchobs.io/inject: auto`: torchobs itself, for an image that lacks it. It ends with status 0 whatever happens. */}}
{{- define "torchobs.copyContainer" -}}
name: torchobs-copy
image: {{ include "torchobs.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [python3, -m, torchobs.injection.copy_site, {{ include "torchobs.siteDir" . }}]
resources:
  requests: {{ .Values.injection.resources.requests | toJson }}
  limits: {{ .Values.injection.resources.limits | toJson }}
securityContext:
  {{- include "torchobs.restricted" . | nindent 2 }}
volumeMounts:
  {{- include "torchobs.noToken" . | nindent 2 }}
  - {name: torchobs-site, mountPath: {{ include "torchobs.siteDir" . }}}
{{- end }}

{{- define "torchobs.siteDir" -}}/var/run/torchobs/site{{- end }}

{{- define "torchobs.trainerMounts" -}}
- {name: torchobs-flight, mountPath: /var/run/torchobs/flight}
- {name: torchobs-control, mountPath: /var/run/torchobs/control, readOnly: true}
{{- end }}

{{- define "torchobs.volumes" -}}
- {name: torchobs-flight, emptyDir: {medium: Memory, sizeLimit: {{ .Values.injection.flightVolumeSize }}}}
- {name: torchobs-control, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
- {name: torchobs-no-token, emptyDir: {sizeLimit: 1Mi}}
{{- end }}

{{- define "torchobs.podEnv" -}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
- {name: POD_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}
- {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
{{- end }}

{{/*
Labels by which the operators name a run, best first: a pod with the label `when` has the run's UID in the label `uid`, its name in
the label `name`. Without one of these its owner's UID and name are taken. What each operator's sources say: docs/kubernetes.md.
A LeaderWorkerSet's webhook labels its pods with the group's key after a policy has seen them, therefore `when`.
*/}}
{{- define "torchobs.runLabels" -}}
- {when: jobset.sigs.k8s.io/jobset-uid, uid: jobset.sigs.k8s.io/jobset-uid, name: jobset.sigs.k8s.io/jobset-name}
- {when: leaderworkerset.sigs.k8s.io/name, uid: leaderworkerset.sigs.k8s.io/group-key, name: leaderworkerset.sigs.k8s.io/name}
- {when: batch.kubernetes.io/controller-uid, uid: batch.kubernetes.io/controller-uid, name: batch.kubernetes.io/job-name}
{{- end }}

{{/* Labels that name the job where the owner's UID names the run, best first. */}}
{{- define "torchobs.nameLabels" -}}
- training.kubeflow.org/job-name
- volcano.sh/job-name
- ray.io/originated-from-cr-name
- ray.io/cluster
{{- end }}

{{/* `include "torchobs.runEnv" (dict "uid" LABEL "name" LABEL)`: the run's id and name, from the pod's labels. */}}
{{- define "torchobs.runEnv" -}}
- name: TORCHOBS_K8S_JOB_NAME
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ .name }}']"}}
- name: TORCHOBS_K8S_JOB_UID
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ .uid }}']"}}
{{- end }}

{{/*
`include "torchobs.podSpec" (dict "root" ROOT "spec" SPEC "kind" "JobSet")`: a pod's spec, as a dict, with torchobs in it, as YAML; for
people who template their own Jobs. ROOT: `.Subcharts.torchobs` of a chart that has this one as a dependency. `kind`: Job [the default],
JobSet, TrainJob or LeaderWorkerSet. `containers`: names of those that train, all if empty. `fsGroup`: false leaves it away. Idempotent.
The pod's labels need those of `torchobs.podLabels`.
*/}}
{{- define "torchobs.podSpec" -}}
{{- $root := .root -}}
{{- $spec := deepCopy .spec -}}
{{- $labels := include "torchobs.runLabels" $root | fromYamlArray -}}
{{- $kinds := dict "JobSet" 0 "TrainJob" 0 "LeaderWorkerSet" 1 "Job" 2 -}}
{{- $kind := .kind | default "Job" -}}
{{- if not (hasKey $kinds $kind) -}}
{{- fail (printf "torchobs.podSpec: kind is %q, and must be one of %s" $kind (keys $kinds | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $names := list -}}
{{- range $spec.containers }}{{ $names = append $names .name }}{{ end -}}
{{- range .containers -}}
{{- if not (has . $names) }}{{ fail (printf "torchobs.podSpec: there is no container %q, but %s" . (join ", " $names)) }}{{ end -}}
{{- end -}}
{{- $trainers := .containers | default $names -}}
{{- $wantsGroup := and $root.Values.injection.fsGroup (ne (toString .fsGroup) "false") -}}
{{- $has := false -}}
{{- range $spec.initContainers }}{{ if eq .name "torchobs" }}{{ $has = true }}{{ end }}{{ end -}}
{{- if not $has -}}
{{- $env := concat (include "torchobs.runEnv" (index $labels (get $kinds $kind)) | fromYamlArray) (include "torchobs.podEnv" $root | fromYamlArray) -}}
{{- $trainerUser := 0 -}}
{{- range $container := $spec.containers -}}
{{- if has $container.name $trainers -}}
{{- $known := list -}}
{{- range $container.env }}{{ $known = append $known .name }}{{ end -}}
{{- range $env }}{{ if not (has .name $known) }}{{ $_ := set $container "env" (append ($container.env | default list) .) }}{{ end }}{{ end -}}
{{- $_ := set $container "volumeMounts" (concat ($container.volumeMounts | default list) (include "torchobs.trainerMounts" $root | fromYamlArray)) -}}
{{- if not $trainerUser }}{{ $trainerUser = int ($container.securityContext | default dict).runAsUser }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $security := $spec.securityContext | default dict -}}
{{- $sidecar := include "torchobs.sidecarWithoutPorts" $root | fromYaml -}}
{{- if not $spec.hostNetwork }}{{ $_ := set $sidecar "ports" (include "torchobs.ports" $root | fromYamlArray) }}{{ end -}}
{{- if ne (int $root.Values.injection.port) 10960 }}{{ $_ := set $sidecar "env" (append $sidecar.env (dict "name" "TORCHOBS_EXPORTER_WEB_LISTEN_ADDRESS" "value" (printf ":%d" (int $root.Values.injection.port)))) }}{{ end -}}
{{- $user := int $security.runAsUser -}}
{{- if and (hasKey $security "runAsUser") (eq $user 0) }}{{ $_ := set $sidecar.securityContext "runAsUser" (include "torchobs.user" $root | int) }}{{ end -}}
{{- if not (hasKey $security "fsGroup") -}}
{{- if $wantsGroup -}}
{{- $_ := set $security "fsGroup" ($user | default $root.Values.injection.fsGroup | int) -}}
{{- $_ := set $security "fsGroupChangePolicy" "OnRootMismatch" -}}
{{- else if and (not $user) $trainerUser -}}
{{- $_ := set $sidecar.securityContext "runAsUser" $trainerUser -}}
{{- else if not (or $user (hasKey $security "runAsGroup")) -}}
{{- $_ := set $sidecar.securityContext "runAsGroup" 0 -}}
{{- end -}}
{{- end -}}
{{- with $security }}{{ $_ := set $spec "securityContext" . }}{{ end -}}
{{- $_ := set $spec "initContainers" (concat (list $sidecar) ($spec.initContainers | default list)) -}}
{{- $_ := set $spec "volumes" (concat ($spec.volumes | default list) (include "torchobs.volumes" $root | fromYamlArray)) -}}
{{- range $secret := include "torchobs.injection.pullSecrets" $root | fromYamlArray -}}
{{- if not (has $secret ($spec.imagePullSecrets | default list)) }}{{ $_ := set $spec "imagePullSecrets" (append ($spec.imagePullSecrets | default list) $secret) }}{{ end -}}
{{- end -}}
{{- $grace := int ($spec.terminationGracePeriodSeconds | default $root.Values.injection.terminationGracePeriodSeconds) -}}
{{- $_ := set $spec "terminationGracePeriodSeconds" $grace -}}
{{- if not (include "torchobs.hasOwnDrainTimeout" $root) -}}
{{- $sidecar := index $spec.initContainers 0 -}}
{{- $_ := set $sidecar "env" (append $sidecar.env (dict "name" "TORCHOBS_EXPORTER_DRAIN_TIMEOUT" "value" (printf "%ds" (max 0 (sub $grace 5))))) -}}
{{- end -}}
{{- end -}}
{{- toYaml $spec -}}
{{- end }}
