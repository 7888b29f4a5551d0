{{/* `include "torchobs.cel" VALUE`: the value as a CEL literal. `dyn`, for Kubernetes' CEL wants the values of a map of one type. */}}
{{- define "torchobs.cel" -}}
{{- if kindIs "map" . -}}
{ {{- $separator := "" -}}
{{- range $key, $value := . }}{{ $separator }}{{ $key | toJson }}: dyn({{ include "torchobs.cel" $value }}){{ $separator = ", " }}{{ end -}}
}
{{- else if kindIs "slice" . -}}
[ {{- $separator := "" -}}
{{- range . }}{{ $separator }}{{ include "torchobs.cel" . }}{{ $separator = ", " }}{{ end -}}
]
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end }}

{{/*
Nothing; fails where another release injects into the same namespaces already: which of two sidecars a pod gets would be chance.
Where a selector has expressions of its own nobody can say, and both are taken.
*/}}
{{- define "torchobs.refuseOverlap" -}}
{{- $version := include "torchobs.policyVersion" . -}}
{{- $ours := .Values.injection.namespaceSelector.matchLabels | default dict -}}
{{- range (lookup (printf "admissionregistration.k8s.io/%s" $version) "MutatingAdmissionPolicy" "" "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $annotations := .metadata.annotations | default dict -}}
{{- $release := get $annotations "meta.helm.sh/release-name" -}}
{{- $namespace := get $annotations "meta.helm.sh/release-namespace" -}}
{{- $isOurs := and (eq $release $.Release.Name) (eq $namespace $.Release.Namespace) -}}
{{- if and $release (not $isOurs) (eq (get $labels "app.kubernetes.io/part-of") "torchobs") -}}
{{- $selector := .spec.matchConstraints.namespaceSelector -}}
{{- $apart := or (gt (len $selector.matchExpressions) 2) $.Values.injection.namespaceSelector.matchExpressions -}}
{{- range $key, $value := $selector.matchLabels }}{{ if and (hasKey $ours $key) (ne (get $ours $key) $value) }}{{ $apart = true }}{{ end }}{{ end -}}
{{- if not $apart -}}
{{- fail (printf "the release %s in namespace %s injects into the same namespaces. Set injection.engine=none here, or give each release an injection.namespaceSelector of its own" $release $namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* What the two engines have in common: which pods, and what is done to them. */}}
{{- define "torchobs.injectionSpec" -}}
{{- $injection := .Values.injection -}}
{{- $site := include "torchobs.siteDir" . -}}
matchConstraints:
  resourceRules:
    - {apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}
  objectSelector:
    matchExpressions:
      - {key: torchobs.io/inject, operator: In, values: ["true", auto]}
  namespaceSelector:
    {{- with $injection.namespaceSelector.matchLabels }}
    matchLabels: {{ toJson . }}
    {{- end }}
    matchExpressions:
      - {key: torchobs.io/inject, operator: NotIn, values: ["false"]}
      - {key: kubernetes.io/metadata.name, operator: NotIn, values: {{ concat (list "kube-system") $injection.excludedNamespaces | uniq | toJson }}}
      {{- with $injection.namespaceSelector.matchExpressions }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
variables:
  # No matchConditions: Kubernetes 1.33 refuses the first policy that has them and uses variables in its mutation.
  # A pod with a sidecar is left alone, for it may be asked again after other mutations, and one that would be refused after the change,
  # which failurePolicy does not cover: names twice, Windows.
  - name: leftAlone
    expression: >-
      (object.spec.containers + (has(object.spec.initContainers) ? object.spec.initContainers : [])).exists(c,
      c.name in ['torchobs', 'torchobs-copy'])
      || (has(object.spec.volumes) && object.spec.volumes.exists(v, v.name.startsWith('torchobs-')))
      || (has(object.spec.os) && object.spec.os.name == 'windows')
      {{- if hasPrefix "REGISTRY/" (include "torchobs.image" .) }}
      || '{{ include "torchobs.image" . }}'.startsWith('REG' + 'ISTRY/')
      {{- end }}
  - name: labels
    expression: object.metadata.labels
  - name: annotations
    expression: "has(object.metadata.annotations) ? object.metadata.annotations : {}"
  - name: owner
    expression: >-
      has(object.metadata.ownerReferences)
      ? object.metadata.ownerReferences.filter(o, has(o.controller) && o.controller) : []
  - name: auto
    expression: variables.labels['torchobs.io/inject'] == 'auto'
  - name: hostNetwork
    expression: has(object.spec.hostNetwork) && object.spec.hostNetwork
  - name: port
    expression: >-
      'torchobs.io/port' in variables.annotations && string(variables.annotations['torchobs.io/port']).matches('^[1-9][0-9]{3,4}$')
      && int(string(variables.annotations['torchobs.io/port'])) > 1023 && int(string(variables.annotations['torchobs.io/port'])) < 65536
      ? int(string(variables.annotations['torchobs.io/port'])) : {{ $injection.port }}
  - name: grace  # seconds; 30 is Kubernetes' default, which is not told from a choice
    expression: >-
      !has(object.spec.terminationGracePeriodSeconds) || object.spec.terminationGracePeriodSeconds == 30
      ? {{ $injection.terminationGracePeriodSeconds }} : int(object.spec.terminationGracePeriodSeconds)
  - name: guaranteed  # all containers have limits, and no other requests
    expression: >-
      (object.spec.containers + (has(object.spec.initContainers) ? object.spec.initContainers : [])).all(c,
      has(c.resources) && has(c.resources.limits) && 'cpu' in c.resources.limits && 'memory' in c.resources.limits
      && (!has(c.resources.requests) || ['cpu', 'memory'].all(r,
      !(r in c.resources.requests) || quantity(string(c.resources.requests[r])).compareTo(quantity(string(c.resources.limits[r]))) == 0)))
  - name: resources  # within bounds: more than a node has would never be scheduled
    expression: >-
      ['cpu', 'memory'].map(r, {
      'name': r,
      'chosen': 'torchobs.io/' + r in variables.annotations && isQuantity(string(variables.annotations['torchobs.io/' + r]))
      && quantity(string(variables.annotations['torchobs.io/' + r])).compareTo(quantity(r == 'cpu' ? '1m' : '32Mi')) >= 0
      && quantity(string(variables.annotations['torchobs.io/' + r])).compareTo(quantity(r == 'cpu' ? '16' : '64Gi')) <= 0
      ? string(variables.annotations['torchobs.io/' + r]) : ''})
  - name: runLabels
    expression: >-
      {{ include "torchobs.runLabels" . | fromYamlArray | include "torchobs.cel" }}.filter(l, string(l.when) in variables.labels)
  - name: nameLabels
    expression: >-
      variables.runLabels.map(l, string(l.name)) + {{ include "torchobs.nameLabels" . | fromYamlArray | include "torchobs.cel" }}
      .filter(l, l in variables.labels)
  - name: runEnv
    expression: >-
      (size(variables.nameLabels) > 0
      ? [{'name': dyn('TORCHOBS_K8S_JOB_NAME'),
      'valueFrom': dyn({'fieldRef': {'fieldPath': "metadata.labels['" + variables.nameLabels[0] + "']"}})}]
      : variables.owner.map(o, {'name': dyn('TORCHOBS_K8S_JOB_NAME'), 'value': dyn(o.name)}))
      + (size(variables.runLabels) > 0
      ? [{'name': dyn('TORCHOBS_K8S_JOB_UID'),
      'valueFrom': dyn({'fieldRef': {'fieldPath': "metadata.labels['" + string(variables.runLabels[0].uid) + "']"}})}]
      : variables.owner.map(o, {'name': dyn('TORCHOBS_K8S_JOB_UID'), 'value': dyn(o.uid)}))
  - name: index  # labels of what stays when a pod is replaced, and is unique in the run: not among the Jobs of a JobSet
    expression: >-
      ['batch.kubernetes.io/job-completion-index', 'apps.kubernetes.io/pod-index'].filter(l, l in variables.labels
      && (size(variables.runLabels) > 0 || size(variables.owner) > 0)
      && variables.runLabels.all(r, string(r.when) == 'batch.kubernetes.io/controller-uid'))
  - name: podRun  # where each pod is a run
    expression: >-
      !('torchobs.io/run' in variables.annotations && variables.annotations['torchobs.io/run'] == 'pod') ? []
      : size(variables.index) > 0
      ? [{'name': dyn('POD_INDEX'),
      'valueFrom': dyn({'fieldRef': {'fieldPath': "metadata.labels['" + variables.index[0] + "']"}})},
      {'name': dyn('TORCHOBS_RUN_ID'), 'value': dyn('$(TORCHOBS_K8S_JOB_UID)-$(POD_INDEX)')}]
      : [{'name': dyn('TORCHOBS_RUN_ID'), 'value': dyn('$(POD_UID)')}]
  - name: env
    expression: >-
      variables.runEnv + {{ include "torchobs.podEnv" . | fromYamlArray | include "torchobs.cel" }} + variables.podRun
      + ('torchobs.io/level' in variables.annotations
      ? [{'name': dyn('TORCHOBS_LEVEL'), 'value': dyn(variables.annotations['torchobs.io/level'])}] : [])
  - name: mounts
    expression: >-
      {{ include "torchobs.trainerMounts" . | fromYamlArray | include "torchobs.cel" }}
      + (variables.auto ? [{'name': dyn('torchobs-site'), 'mountPath': dyn('{{ $site }}'), 'readOnly': dyn(true)}] : [])
  - name: chosen  # by the annotation; names that no container has are no choice
    expression: >-
      'torchobs.io/containers' in variables.annotations
      ? string(variables.annotations['torchobs.io/containers']).split(',').map(n, n.trim()).filter(n,
      object.spec.containers.exists(c, c.name == n)) : []
  - name: containers  # those that train. 16 are enough; JSON Patch goes by number
    expression: >-
      [{{ until 16 | join ", " }}].filter(i, i < size(object.spec.containers) && (size(variables.chosen) > 0
      ? object.spec.containers[i].name in variables.chosen : !(object.spec.containers[i].name in {{ $injection.excludedContainers | default list | toJson }})))
  - name: security
    expression: "has(object.spec.securityContext) ? object.spec.securityContext : {}"
  - name: user  # -1: the image's
    expression: "has(variables.security.runAsUser) ? int(variables.security.runAsUser) : -1"
  - name: fsGroup  # 0: none is added
    expression: >-
      has(variables.security.fsGroup) || ('torchobs.io/fsgroup' in variables.annotations && variables.annotations['torchobs.io/fsgroup'] == 'false')
      ? 0 : {{ if $injection.fsGroup }}(variables.user > 0 ? variables.user : {{ int $injection.fsGroup }}){{ else }}0{{ end }}
  - name: sidecarUser  # who may read the flight files where no group joins the containers
    expression: >-
      variables.user == 0 ? [{{ include "torchobs.user" . }}]
      : variables.user < 0 && variables.fsGroup == 0 && !has(variables.security.fsGroup)
      ? variables.containers.map(i, object.spec.containers[i])
      .filter(c, has(c.securityContext) && has(c.securityContext.runAsUser) && c.securityContext.runAsUser > 0)
      .map(c, int(c.securityContext.runAsUser)) : []
  - name: sidecarGroup  # root's, which a user of OpenShift has, too
    expression: >-
      variables.fsGroup == 0 && !has(variables.security.fsGroup) && !has(variables.security.runAsGroup)
      && !variables.sidecarUser.exists(u, u != {{ include "torchobs.user" . }}) && variables.user <= 0
  - name: pullSecrets
    expression: >-
      {{ include "torchobs.injection.pullSecrets" . | fromYamlArray | include "torchobs.cel" }}.filter(s,
      !(has(object.spec.imagePullSecrets) && object.spec.imagePullSecrets.exists(p, has(p.name) && p.name == s.name)))
mutations:
  - patchType: JSONPatch
    jsonPatch:
      expression: >-
        variables.leftAlone ? [] : [
        JSONPatch{op: 'add', path: '/metadata/labels/torchobs', value: 'sidecar'},
        JSONPatch{op: 'add', path: '/metadata/annotations', value: variables.annotations},
        JSONPatch{op: 'add', path: '/metadata/annotations/torchobs.io~1injected',
        value: (variables.auto ? 'torchobs and its exporter, ' : 'the exporter, ') + '{{ include "torchobs.image" . }}'},
        JSONPatch{op: 'add', path: '/spec/volumes', value: (has(object.spec.volumes) ? object.spec.volumes : [])
        + {{ include "torchobs.volumes" . | fromYamlArray | include "torchobs.cel" }}
        + (variables.auto ? [{'name': dyn('torchobs-site'), 'emptyDir': dyn({})}] : [])},
        JSONPatch{op: 'add', path: '/spec/initContainers', value:
        [{{ include "torchobs.sidecarWithoutPorts" . | fromYaml | include "torchobs.cel" }}]
        + (variables.auto ? [{{ include "torchobs.copyContainer" . | fromYaml | include "torchobs.cel" }}] : [])
        + (has(object.spec.initContainers) ? object.spec.initContainers : [])}
        ]
        + (variables.hostNetwork ? [] : [JSONPatch{op: 'add', path: '/spec/initContainers/0/ports',
        value: [{'name': dyn('torchobs'), 'containerPort': dyn(variables.port)}]}])
        {{- if not (include "torchobs.hasOwnDrainTimeout" .) }}
        + [JSONPatch{op: 'add', path: '/spec/initContainers/0/env/-',
        value: {'name': 'TORCHOBS_EXPORTER_DRAIN_TIMEOUT', 'value': string(variables.grace > 5 ? variables.grace - 5 : 0) + 's'}}]
        {{- end }}
        + (variables.port == 10960 ? [] : [JSONPatch{op: 'add', path: '/spec/initContainers/0/env/-',
        value: {'name': 'TORCHOBS_EXPORTER_WEB_LISTEN_ADDRESS', 'value': ':' + string(variables.port)}}])
        + (size(variables.pullSecrets) == 0 ? [] : [JSONPatch{op: 'add', path: '/spec/imagePullSecrets',
        value: (has(object.spec.imagePullSecrets) ? object.spec.imagePullSecrets : []) + variables.pullSecrets}])
        + (variables.guaranteed ? [0, 1].filter(i, i == 0 || variables.auto).map(i, JSONPatch{op: 'add',
        path: '/spec/initContainers/' + string(i) + '/resources', value: {{ include "torchobs.guaranteedResources" . | fromYaml | include "torchobs.cel" }}}) : [])
        + variables.resources.filter(r, r.chosen != '').map(r, JSONPatch{op: 'add',
        path: '/spec/initContainers/0/resources/requests/' + r.name, value: r.chosen})
        + variables.resources.filter(r, r.chosen != '').map(r, JSONPatch{op: 'add',
        path: '/spec/initContainers/0/resources/limits/' + r.name, value: r.chosen})
        + (size(variables.sidecarUser) == 0 ? [] : [0, 1].filter(i, i == 0 || variables.auto).map(i, JSONPatch{op: 'add',
        path: '/spec/initContainers/' + string(i) + '/securityContext/runAsUser', value: variables.sidecarUser[0]}))
        + (variables.sidecarGroup ? [JSONPatch{op: 'add', path: '/spec/initContainers/0/securityContext/runAsGroup', value: 0}] : [])
        + (has(object.spec.securityContext) ? [] : [JSONPatch{op: 'add', path: '/spec/securityContext', value: {} }])
        + (variables.fsGroup == 0 ? [] : [JSONPatch{op: 'add', path: '/spec/securityContext/fsGroup', value: variables.fsGroup},
        JSONPatch{op: 'add', path: '/spec/securityContext/fsGroupChangePolicy', value: 'OnRootMismatch'}])
        + [JSONPatch{op: 'add', path: '/spec/terminationGracePeriodSeconds', value: variables.grace}]
        + variables.containers.map(i, JSONPatch{op: 'add', path: '/spec/containers/' + string(i) + '/env',
        value: (has(object.spec.containers[i].env) ? object.spec.containers[i].env.map(e,
        variables.auto && e.name == 'PYTHONPATH'
        ? (has(e.valueFrom) ? dyn({'name': dyn('PYTHONPATH_OF_POD'), 'valueFrom': dyn(e.valueFrom)})
        : dyn({'name': 'PYTHONPATH', 'value': '{{ $site }}/start' + (has(e.value) ? ':' + e.value : '')})) : dyn(e)) : [])
        + variables.env.filter(n, !(has(object.spec.containers[i].env)
        && object.spec.containers[i].env.exists(e, e.name == n.name)))
        + (!variables.auto || (has(object.spec.containers[i].env)
        && object.spec.containers[i].env.exists(e, e.name == 'PYTHONPATH' && !has(e.valueFrom))) ? []
        : has(object.spec.containers[i].env) && object.spec.containers[i].env.exists(e, e.name == 'PYTHONPATH')
        ? [{'name': dyn('PYTHONPATH'), 'value': dyn('{{ $site }}/start:$(PYTHONPATH_OF_POD)')}]
        : 'torchobs.io/pythonpath' in variables.annotations
        ? [{'name': dyn('PYTHONPATH'), 'value': dyn('{{ $site }}/start' + (variables.annotations['torchobs.io/pythonpath'] == '' ? ''
        : ':' + variables.annotations['torchobs.io/pythonpath']))}]
        : has(object.spec.containers[i].env) && object.spec.containers[i].env.exists(e, e.name == 'PYTHONUSERBASE') ? []
        : [{'name': dyn('PYTHONUSERBASE'), 'value': dyn('{{ $site }}/user')}])})
        + variables.containers.map(i, JSONPatch{op: 'add', path: '/spec/containers/' + string(i) + '/volumeMounts',
        value: (has(object.spec.containers[i].volumeMounts) ? object.spec.containers[i].volumeMounts : [])
        + variables.mounts.filter(n, !(has(object.spec.containers[i].volumeMounts)
        && object.spec.containers[i].volumeMounts.exists(m, m.mountPath == n.mountPath)))})
{{- end }}
