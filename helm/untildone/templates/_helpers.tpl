{{/* Names and labels that the templates share. */}}

{{- define "untildone.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Release and chart name; just one of them when they say the same. */}}
{{- define "untildone.fullname" -}}
{{- $name := include "untildone.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Objects outside namespaces need names that no other release has. */}}
{{- define "untildone.clusterName" -}}
{{- $name := include "untildone.fullname" . }}
{{- if eq $name .Release.Namespace }}{{ $name }}{{ else }}{{ printf "%s-%s" .Release.Namespace $name }}{{ end }}
{{- end }}

{{- define "untildone.selectorLabels" -}}
app.kubernetes.io/name: {{ include "untildone.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "untildone.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "untildone.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: untildone
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "untildone.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "untildone.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is not set: with serviceAccount.create false, name an account that exists" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "untildone.image" -}}
{{- $repository := required "image.repository is not set: build docker/operator.Dockerfile, push it to your registry and name it here" .Values.image.repository }}
{{- if .Values.image.digest }}
{{- printf "%s@%s" $repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{/* The namespaces that are watched, as a JSON list; empty: all. */}}
{{- define "untildone.watchNamespaces" -}}
{{- if or .Values.watchNamespaces .Values.rbac.clusterWide }}
{{- .Values.watchNamespaces | uniq | sortAlpha | toJson }}
{{- else }}
{{- list .Release.Namespace | toJson }}
{{- end }}
{{- end }}

{{- define "untildone.podSecurityContext" -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "untildone.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: ["ALL"]
{{- end }}
