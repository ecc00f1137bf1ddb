{{/*
What the operator may do. orchestrator/operating/rights.py has the same list beside what each right is for; a test
compares the two.
*/}}

{{/* In each namespace whose runs it looks after. */}}
{{- define "untildone.namespacedRules" -}}
- apiGroups: ["untildone.dev"]
  resources: ["trainingruns"]
  verbs: ["list", "watch"]
- apiGroups: ["untildone.dev"]
  resources: ["trainingruns/status"]
  verbs: ["patch"]
# Where the API server checks it, owner references that block deletion need this.
- apiGroups: ["untildone.dev"]
  resources: ["trainingruns/finalizers"]
  verbs: ["update"]
- apiGroups: ["jobset.x-k8s.io"]
  resources: ["jobsets"]
  verbs: ["create", "delete", "get", "list", "watch"]
- apiGroups: ["kueue.x-k8s.io"]
  resources: ["workloads"]
  verbs: ["list", "watch"]
- apiGroups: ["kueue.x-k8s.io"]
  resources: ["localqueues"]
  verbs: ["list", "watch"]
- apiGroups: [""]
  resources: ["pods"]
  verbs: ["list", "watch"]
# For dry runs: what is wrong with a pod is said before the run is accepted. Who may create JobSets has this anyway.
- apiGroups: [""]
  resources: ["pods"]
  verbs: ["create"]
- apiGroups: [""]
  resources: ["configmaps"]
  verbs: ["get"]
- apiGroups: [""]
  resources: ["events"]
  verbs: ["create"]
{{- end }}

{{/* Outside namespaces, always: the uid of kube-system is the cluster's name. */}}
{{- define "untildone.clusterRules" -}}
- apiGroups: [""]
  resources: ["namespaces"]
  resourceNames: ["kube-system"]
  verbs: ["get"]
{{- end }}

{{/* Outside namespaces, with rbac.clusterReads. */}}
{{- define "untildone.clusterReads" -}}
- apiGroups: [""]
  resources: ["nodes"]
  verbs: ["list", "watch"]
- apiGroups: ["kueue.x-k8s.io"]
  resources: ["clusterqueues", "resourceflavors"]
  verbs: ["list", "watch"]
{{- end }}

{{/* In the release's own namespace. */}}
{{- define "untildone.ownRules" -}}
- apiGroups: ["coordination.k8s.io"]
  resources: ["leases"]
  verbs: ["create"]
- apiGroups: ["coordination.k8s.io"]
  resources: ["leases"]
  resourceNames: [{{ include "untildone.fullname" . | quote }}]
  verbs: ["get", "update"]
{{- end }}
