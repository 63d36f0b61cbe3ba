package volume

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// A Want is a volume that the creator of a sandbox requests.
type Want struct {
	Name string // name of the volume
	Path string // mount point in the sandbox
}

// maxMounts is the number of volumes per sandbox. Each is a connection of the
// sandbox's kernel to its gofer.
const maxMounts = 16

// system are the directories at and below which no volume may be mounted: the
// sandbox needs their content, or they are other file systems. /var/run and
// /var/lock are links to /run.
var system = []string{
	"/proc", "/sys", "/dev", "/run", "/var/run", "/var/lock", "/boot", "/etc",
	"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
}

// parents are directories that may contain mounts but cannot be one.
var parents = []string{"/", "/home", "/var", "/tmp"}

// CheckWants returns an error that wraps [ErrInvalid] unless a sandbox may have
// these mounts. It does not check that the volumes exist.
func CheckWants(wants []Want) error {
	bad := func(i int, format string, a ...any) error {
		return fmt.Errorf("%w: volumeMounts[%d]: %s", ErrInvalid, i, fmt.Sprintf(format, a...))
	}
	if len(wants) > maxMounts {
		return fmt.Errorf("%w: volumeMounts: has %d volumes, at most %d are allowed", ErrInvalid, len(wants), maxMounts)
	}
	for i, w := range wants {
		switch {
		case !namePattern().MatchString(w.Name):
			return bad(i, "name: want 1 to 128 letters, digits, _ and -")
		case !path.IsAbs(w.Path) || path.Clean(w.Path) != w.Path:
			return bad(i, "path: want an absolute path without '.', '..', double or trailing slashes")
		case len(w.Path) > 512 || strings.ContainsFunc(w.Path, func(r rune) bool { return r < ' ' || r == 0x7f || r == 0xfffd }):
			return bad(i, "path: want at most 512 bytes of text")
		case slices.Contains(parents, w.Path):
			return bad(i, "path: %s itself cannot be a volume; a directory below it can", w.Path)
		}
		for _, d := range system {
			if within(w.Path, d) {
				return bad(i, "path: %s is a system directory", d)
			}
		}
		for _, o := range wants[:i] {
			// A volume within another would need its mount point there.
			if within(w.Path, o.Path) || within(o.Path, w.Path) {
				return bad(i, "path: %s and %s overlap", w.Path, o.Path)
			}
		}
	}
	return nil
}

// within reports whether p is dir or below it.
func within(p, dir string) bool { return p == dir || strings.HasPrefix(p, dir+"/") }
