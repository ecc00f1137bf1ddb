{{/* The file that `untildone operator --config` reads. */}}
{{- define "untildone.configuration" -}}
runDirectories: {{- if .Values.runDirectories }}{{ toYaml .Values.runDirectories | nindent 2 }}{{ else }} {}{{ end }}
watchNamespaces: {{ include "untildone.watchNamespaces" . }}
workers: {{ .Values.workers }}
lease:
  enabled: {{ .Values.leaderElection.enabled }}
  name: {{ include "untildone.fullname" . }}
  namespace: {{ .Release.Namespace }}
health:
  port: {{ .Values.healthPort }}
logLevel: {{ .Values.logLevel }}
{{- end }}
