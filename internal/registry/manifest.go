package registry

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"runtime"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// manifestTypes are the media types that requests accept.
var manifestTypes = []string{
	string(types.OCIImageIndex), string(types.DockerManifestList), string(types.OCIManifestSchema1), string(types.DockerManifestSchema2),
}

// maxParts bounds the objects and members in a manifest. Large indexes have some 1000.
const maxParts = 50_000

// maxDepth bounds the chain of indexes that leads to a manifest. The Image Specification
// allows an index of indexes. A longer chain could be a cycle.
const maxDepth = 3

// manifest fetches the manifest for this machine's platform.
func (s *session) manifest(ctx context.Context) (*v1.Manifest, v1.Hash, error) {
	id := s.ref.Identifier()
	var want *v1.Descriptor
	if d, ok := s.ref.(name.Digest); ok {
		h, err := v1.NewHash(d.DigestStr())
		if err != nil {
			return nil, v1.Hash{}, fmt.Errorf("%w: %w", ErrInvalid, err)
		}
		want = &v1.Descriptor{Digest: h, Size: -1}
	}
	for range maxDepth {
		var b []byte
		var kind string
		err := s.again(ctx, func() (err error) {
			b, kind, err = s.fetchManifest(ctx, id)
			return err
		})
		if err != nil {
			return nil, v1.Hash{}, fmt.Errorf("manifest: %w", err)
		}
		digest := hashOf(b)
		if want != nil && (digest != want.Digest || want.Size >= 0 && int64(len(b)) != want.Size) {
			return nil, v1.Hash{}, fmt.Errorf("%w: the registry %s sent a manifest that does not match %s", ErrInvalid, s.at.address(), want.Digest)
		}
		m, next, err := parseManifest(b, kind)
		if err != nil || m != nil {
			return m, digest, err
		}
		want, id = next, next.Digest.String()
	}
	return nil, v1.Hash{}, fmt.Errorf("%w: more than %d indexes lead to its manifest", ErrInvalid, maxDepth-1)
}

func (s *session) fetchManifest(ctx context.Context, id string) ([]byte, string, error) {
	res, err := s.get(ctx, http.MethodGet, "/v2/"+s.repo+"/manifests/"+id, manifestTypes)
	if err != nil {
		return nil, "", err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, maxManifest+1))
	if err != nil {
		return nil, "", s.unreachable(s.at, err)
	}
	if len(b) > maxManifest {
		return nil, "", fmt.Errorf("%w: the manifest is larger than %d bytes", ErrInvalid, maxManifest)
	}
	kind, _, _ := mime.ParseMediaType(res.Header.Get("Content-Type")) // the manifest may name its type itself
	return b, kind, nil
}

func hashOf(b []byte) v1.Hash {
	sum := sha256.Sum256(b)
	return v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum[:])}
}

// parseManifest parses a manifest, or an index. For an index it returns the descriptor of
// the manifest to fetch next. kind is the media type of the response, and may be empty.
func parseManifest(b []byte, kind string) (*v1.Manifest, *v1.Descriptor, error) {
	// The attack: four megabytes of "{}" become a hundred times as much in memory.
	if n := bytes.Count(b, []byte("{")) + bytes.Count(b, []byte(":")); n > maxParts {
		return nil, nil, fmt.Errorf("%w: the manifest has more than %d parts", ErrInvalid, maxParts)
	}
	var m struct {
		v1.Manifest

		Manifests []v1.Descriptor `json:"manifests"`
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return nil, nil, fmt.Errorf("%w: the manifest is malformed: %w", ErrInvalid, err)
	}
	if m.MediaType != "" {
		kind = string(m.MediaType)
	}
	// The attack: one document that is an index for one program and a manifest for
	// another (advisory GHSA-77vh-xpmg-72qh of the Image Specification).
	if m.Manifests != nil && (m.Layers != nil || m.Config.Digest.Hex != "") {
		return nil, nil, fmt.Errorf("%w: the manifest is also an index", ErrInvalid)
	}
	switch t := types.MediaType(kind); {
	case m.Manifests != nil && (t.IsIndex() || kind == "" || !strings.HasPrefix(kind, "application/vnd.")):
		d, err := choose(m.Manifests)
		return nil, d, err
	case t == types.OCIManifestSchema1 || t == types.DockerManifestSchema2 || kind == "" || !strings.HasPrefix(kind, "application/vnd."):
		if m.SchemaVersion == 2 && m.Config.Digest.Hex != "" {
			return &m.Manifest, nil, nil
		}
	}
	if m.SchemaVersion == 1 {
		return nil, nil, fmt.Errorf("%w: its manifest has Docker's obsolete schema 1: push the image again with a current tool", ErrInvalid)
	}
	return nil, nil, fmt.Errorf("%w: its manifest has the type %q, which is not a container image's", ErrInvalid, printable(kind))
}

// errPlatform means that an image is for other platforms only.
var errPlatform = fmt.Errorf("%w: it does not support linux/%s", ErrInvalid, runtime.GOARCH)

// choose returns the manifest or index for this machine's platform.
func choose(ds []v1.Descriptor) (*v1.Descriptor, error) {
	var have []string
	for i, d := range ds {
		if !d.MediaType.IsImage() && !d.MediaType.IsIndex() || d.Digest.Hex == "" || d.Size <= 0 || d.Size > maxManifest {
			continue
		}
		if platform(d.Platform) {
			return &ds[i], nil
		}
		if len(have) < 8 {
			have = append(have, printable(d.Platform.String()))
		}
	}
	return nil, fmt.Errorf("%w: it is for %s", errPlatform, strings.Join(have, ", "))
}

// checkLayers validates the layers in a manifest and returns their compressed size.
func checkLayers(m *v1.Manifest, c Config) (int64, error) {
	if len(m.Layers) > c.MaxLayers {
		return 0, fmt.Errorf("%w: it has %d layers, at most %d are allowed", ErrInvalid, len(m.Layers), c.MaxLayers)
	}
	if t := m.Config.MediaType; t != types.OCIConfigJSON && t != types.DockerConfigJSON {
		return 0, fmt.Errorf("%w: its configuration has the type %q, which is not a container image's", ErrInvalid, printable(string(t)))
	}
	if m.Config.Size <= 0 || m.Config.Size > maxConfig {
		return 0, fmt.Errorf("%w: its configuration has %d bytes, not 1 to %d", ErrInvalid, m.Config.Size, maxConfig)
	}
	var sum int64
	for i, l := range m.Layers {
		switch l.MediaType {
		case types.OCILayer, types.OCILayerZStd, types.OCIUncompressedLayer, types.DockerLayer, types.DockerUncompressedLayer, "application/vnd.docker.image.rootfs.diff.tar.zstd":
		default:
			// Foreign layers too: the image's author chooses the hosts of their URLs.
			return 0, fmt.Errorf("%w: layer %d has the type %q, which is not a tar archive", ErrInvalid, i+1, printable(string(l.MediaType)))
		}
		if len(l.URLs) > 0 {
			return 0, fmt.Errorf("%w: layer %d has external URLs, which are not supported: push the image with its layers", ErrInvalid, i+1)
		}
		if l.Digest.Hex == "" || l.Size <= 0 || l.Size > c.MaxCompressed {
			return 0, fmt.Errorf("%w: layer %d has no digest or a size that is not 1 to %d bytes", ErrInvalid, i+1, c.MaxCompressed)
		}
		if sum += l.Size; sum > c.MaxCompressed {
			return 0, fmt.Errorf("%w: its layers have more than %d bytes together", ErrInvalid, c.MaxCompressed)
		}
	}
	return sum, nil
}

const (
	maxEnv      = 1000
	maxEnvBytes = 256 << 10 // of all variables
)

// A configuration has the parts of an image's configuration that are used. The rest, such
// as the history, is not parsed.
type configuration struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
	Config       struct {
		Env []string `json:"Env"`
	} `json:"config"`
	RootFS struct {
		DiffIDs []v1.Hash `json:"diff_ids"`
	} `json:"rootfs"`
}

// parseConfig reads an image's configuration.
func parseConfig(b []byte, m *v1.Manifest) (*configuration, error) {
	var c configuration
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, fmt.Errorf("%w: its configuration is malformed: %w", ErrInvalid, err)
	}
	if (c.OS != "" && c.OS != "linux") || (c.Architecture != "" && c.Architecture != runtime.GOARCH) {
		return nil, fmt.Errorf("%w: it is for %s/%s", errPlatform, printable(c.OS), printable(c.Architecture))
	}
	if len(c.RootFS.DiffIDs) != len(m.Layers) {
		return nil, fmt.Errorf("%w: its configuration names %d layers, and its manifest %d", ErrInvalid, len(c.RootFS.DiffIDs), len(m.Layers))
	}
	for _, h := range c.RootFS.DiffIDs {
		if h.Algorithm != "sha256" || len(h.Hex) != 64 {
			return nil, fmt.Errorf("%w: its configuration has a layer without a digest", ErrInvalid)
		}
	}
	sum := 0
	for _, v := range c.Config.Env {
		sum += len(v)
		if i := strings.IndexByte(v, '='); i < 1 || strings.ContainsRune(v, 0) {
			return nil, fmt.Errorf("%w: its configuration has the variable %q, which is not NAME=value", ErrInvalid, printable(v))
		}
	}
	if len(c.Config.Env) > maxEnv || sum > maxEnvBytes {
		return nil, fmt.Errorf("%w: its configuration has more than %d variables, or %d bytes of them", ErrInvalid, maxEnv, maxEnvBytes)
	}
	return &c, nil
}

// small fetches a blob into memory.
func (s *session) small(ctx context.Context, d v1.Descriptor, limit int64) (b []byte, err error) {
	err = s.again(ctx, func() error {
		res, err := s.get(ctx, http.MethodGet, "/v2/"+s.repo+"/blobs/"+d.Digest.String(), nil)
		if err != nil {
			return err
		}
		defer res.Body.Close()
		var buf bytes.Buffer
		if _, err := io.Copy(&buf, io.LimitReader(res.Body, limit+1)); err != nil {
			return s.unreachable(s.at, err)
		}
		if b = buf.Bytes(); int64(len(b)) != d.Size || hashOf(b) != d.Digest {
			return fmt.Errorf("%w: the registry %s sent bytes that do not match %s", ErrInvalid, s.at.address(), d.Digest)
		}
		return nil
	})
	return b, err
}
