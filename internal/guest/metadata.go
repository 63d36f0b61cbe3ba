package guest

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// A file's metadata is what a client sent with it. It is stored in extended
// attributes of the file, so that it moves with the file and programs inside can
// read and set it, too.
const (
	metadataHeader = "X-Metadata-"
	metadataAttr   = "user.e2b."

	// maxMetadata bounds the metadata in one response, in bytes: code inside can
	// attach 64 KiB to each of many files.
	maxMetadata = 8 << 20
)

// headerMetadata returns the metadata in a request's header, or nil if there is
// none. Keys are lower case, since header names are case-insensitive.
func headerMetadata(h http.Header) (map[string]string, error) {
	var meta map[string]string
	for _, name := range slices.Sorted(maps.Keys(h)) {
		values := h[name]
		key, ok := strings.CutPrefix(name, metadataHeader)
		if !ok {
			// The name is not in canonical form if it has an unusual character.
			if len(name) < len(metadataHeader) || !strings.EqualFold(name[:len(metadataHeader)], metadataHeader) {
				continue
			}
			key = name[len(metadataHeader):]
		}
		if key == "" || len(values) == 0 {
			continue
		}
		key = strings.ToLower(key)
		if len(metadataAttr+key) > unix.NAME_MAX {
			return nil, fmt.Errorf("the metadata key %.20q… is longer than %d bytes", key, unix.NAME_MAX-len(metadataAttr))
		}
		if strings.ContainsFunc(values[0], func(r rune) bool { return r < ' ' || r > '~' }) {
			return nil, fmt.Errorf("the value of the metadata key %q is not printable ASCII", key)
		}
		if meta == nil {
			meta = map[string]string{}
		}
		meta[key] = values[0]
	}
	return meta, nil
}

// setMetadata replaces the metadata of a file. The caller has taken the user's
// rights: the kernel checks them at each call, not when f was opened.
func setMetadata(f *os.File, meta map[string]string) error {
	fd := int(f.Fd())
	old, err := attrs(func(b []byte) (int, error) { return unix.Flistxattr(fd, b) })
	if errors.Is(err, unix.ENOTSUP) && len(meta) == 0 {
		return nil
	} else if err != nil && !errors.Is(err, unix.ENOTSUP) {
		return fmt.Errorf("list metadata: %w", err)
	}
	for _, name := range old {
		if _, stays := meta[name[len(metadataAttr):]]; !stays {
			if err := unix.Fremovexattr(fd, name); err != nil && !errors.Is(err, unix.ENODATA) {
				return fmt.Errorf("remove metadata: %w", err)
			}
		}
	}
	for _, key := range slices.Sorted(maps.Keys(meta)) {
		err := unix.Fsetxattr(fd, metadataAttr+key, []byte(meta[key]), 0)
		switch {
		case errors.Is(err, unix.ENOTSUP):
			return badRequest(fmt.Errorf("the file system of %s keeps no metadata", f.Name()))
		case errors.Is(err, unix.E2BIG), errors.Is(err, unix.ERANGE):
			return badRequest(fmt.Errorf("the metadata of %s is too large", f.Name()))
		case err != nil:
			return fmt.Errorf("set metadata: %w", err)
		}
	}
	return nil
}

// metadata returns the metadata of path that fits into *room bytes. Unreadable
// attributes are left out.
func metadata(path string, room *int) map[string]string {
	names, err := attrs(func(b []byte) (int, error) { return unix.Listxattr(path, b) })
	if err != nil || len(names) == 0 {
		return nil
	}
	meta := map[string]string{}
	for _, name := range names {
		v, err := whole(func(b []byte) (int, error) { return unix.Getxattr(path, name, b) })
		if err != nil {
			continue
		}
		if *room -= len(name) + len(v); *room < 0 {
			break
		}
		meta[utf8(name[len(metadataAttr):])] = utf8(string(v))
	}
	return meta
}

// attrs returns the names of a file's attributes that hold metadata.
func attrs(list func([]byte) (int, error)) ([]string, error) {
	b, err := whole(list)
	if err != nil {
		return nil, err
	}
	var names []string
	for name := range bytes.SplitSeq(b, []byte{0}) {
		if strings.HasPrefix(string(name), metadataAttr) {
			names = append(names, string(name))
		}
	}
	return names, nil
}

// whole calls a system call that fills a buffer, with a buffer that is large
// enough.
func whole(f func([]byte) (int, error)) ([]byte, error) {
	for b := make([]byte, 512); ; b = make([]byte, 16*len(b)) {
		n, err := f(b)
		if errors.Is(err, unix.ERANGE) && len(b) < 1<<20 {
			continue
		}
		if err != nil {
			return nil, err
		}
		return b[:n], nil
	}
}

// utf8 makes a name of a hostile process valid UTF-8. Protobuf refuses a message
// with other text, and with it the description of all other files.
func utf8(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
