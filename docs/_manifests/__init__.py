"""The manifests of deploy/kustomize: what Helm renders of each layout of deploy/layouts, for those who apply manifests without Helm."""
