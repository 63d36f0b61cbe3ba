// Package registry fetches container images: from registries by the OCI Distribution
// Specification, from OCI layout directories and from the files of "docker save".
//
// Names and credentials come from callers, and everything that a registry answers is
// hostile. Each blob is verified against its digest, and bounded.
package registry

import "errors"

// ErrInvalid means that a reference, credentials or an image are malformed or beyond a
// limit. The text says what.
var ErrInvalid = errors.New("invalid image")

// Credentials are for one registry. The zero value means none.
type Credentials struct {
	Username, Password string // basic

	AWSKeyID, AWSSecret, AWSRegion string // of Amazon ECR
	GCPKey                         string // JSON of a service account, for Google Artifact Registry
}

// An Image is an image whose layers are on this machine.
type Image struct {
	Name   string   // as it was asked for
	Digest string   // "sha256:" and 64 hex digits, of the manifest for this machine's platform
	Env    []string // NAME=value
	Layers []Layer  // from the bottom up
}

// A Layer is one layer of an image.
type Layer struct {
	Digest string // of the compressed blob
	DiffID string // of the tar archive
	Path   string // absolute path of the tar archive, uncompressed; read only
}
