package gvisor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"postern/internal/sandbox"
	"postern/internal/sandbox/launch"
)

// The root file system of a sandbox may be an EROFS image. The launcher opens it for
// reading, and the sentry maps it: there is no gofer, all sandboxes share the pages of
// the image in the host's page cache, and a compromised sentry has a descriptor that
// cannot be written, of a file that holds nothing of other sandboxes.
//
// The guest is not part of the image, since it changes more often: it is an image of
// a single file that is mounted over an empty file.

// addImage makes the image of s the root file system of spec. Writes go to a file in
// dir that has no name, as they do without an image, up to the limit on disk.
func addImage(spec *specs.Spec, s sandbox.Spec, dir string) {
	if s.Image.Root == "" {
		return
	}
	spec.Annotations[launch.AnnotationRootfs+"source"] = s.Image.Root
	spec.Annotations[launch.AnnotationRootfs+"type"] = launch.Erofs
	spec.Annotations[launch.AnnotationRootfs+"overlay"] = "dir=" + dir
	spec.Annotations[launch.AnnotationRootfs+"options"] = "size=" + strconv.FormatInt(s.DiskMB<<20, 10)
	if s.Image.Guest != "" {
		spec.Mounts = append(spec.Mounts, specs.Mount{
			Destination: guestArgs[0], Type: launch.Erofs, Source: s.Image.Guest, Options: []string{"ro", "nodev"},
		})
	}
}

// imageNames are the names of the images of a sandbox, without directories.
type imageNames struct {
	Root  string `json:"root"`
	Guest string `json:"guest,omitzero"`
}

// namesOfImages returns the images that addImage has put into spec.
func namesOfImages(spec *specs.Spec) (n imageNames) {
	if root := spec.Annotations[launch.AnnotationRootfs+"source"]; root != "" {
		n.Root = filepath.Base(root)
	}
	for _, m := range spec.Mounts {
		if m.Type == launch.Erofs && m.Destination == guestArgs[0] {
			n.Guest = filepath.Base(m.Source)
		}
	}
	return n
}

// image returns the image for a sandbox that starts from the snapshot, given the
// current one. A sandbox restored from memory has open files, so it must have the
// images of the saved one, which are beside the current ones. If the saved one had
// none, neither has it.
func (snap snapshot) image(now sandbox.Image) (sandbox.Image, error) {
	if snap.Kind == launch.Files {
		return now, nil // a boot
	}
	if snap.Images == (imageNames{}) {
		return sandbox.Image{}, nil
	}
	find := func(name, beside string) (string, error) {
		if name == "" {
			return "", nil
		}
		if name != filepath.Base(name) {
			return "", fmt.Errorf("the snapshot names the image %q, which is not a name", name)
		}
		if beside == "" {
			return "", fmt.Errorf("the snapshot was made on the image %s, and the template has none: build it with \"postern template build\"", name)
		}
		path := filepath.Join(filepath.Dir(beside), name)
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("the snapshot was made on the image %s, which does not exist any more", path)
		} else if err != nil {
			return "", fmt.Errorf("find image of snapshot: %w", err)
		}
		return path, nil
	}
	root, err := find(snap.Images.Root, now.Root)
	if err != nil {
		return sandbox.Image{}, err
	}
	beside := now.Guest
	if beside == "" {
		beside = now.Root
	}
	guest, err := find(snap.Images.Guest, beside)
	return sandbox.Image{Root: root, Guest: guest}, err
}
