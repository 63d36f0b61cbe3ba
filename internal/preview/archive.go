package preview

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"path"
	"path/filepath"
	"strings"
)

// The limits of an archive.
const (
	maxMembers  = 200      // names that are shown
	maxCounted  = 20_000   // names that are counted
	maxUnpacked = 64 << 20 // bytes of a compressed tar archive that are unpacked
)

// A Listing is the table of contents of an archive.
type Listing struct {
	Members []Member
	Total   int   // files in all
	Size    int64 // bytes of all files, as the archive claims
}

// A Member is one file of an archive. Its name is hostile.
type Member struct {
	Name string
	Size int64  // bytes, as the archive claims
	Say  string // a warning for people; may be empty
}

// archive lists an archive. It does not change f.Form if it does not know the format.
func (f *File) archive(data []byte) {
	l, err := listing(data)
	switch {
	case err != nil && len(l.Members) == 0:
		return
	case err != nil:
		f.missing("the archive cannot be read to its end")
	}
	f.Form, f.Members = Archive, l
	f.Facts = plural(l.Total, "file", "files") + " in it"
	f.missing("only the names are shown, not the content of the files")
	if l.Total > len(l.Members) {
		f.missing("names 1 to %d of %d", len(l.Members), l.Total)
	}
	programs, sealed, out := 0, 0, 0
	for _, m := range l.Members {
		switch m.Say {
		case sayProgram:
			programs++
		case sayEncrypted:
			sealed++
		case sayOut:
			out++
		}
	}
	if programs > 0 {
		f.note("%s in it would run when opened", plural(programs, "file", "files"))
	}
	if sealed > 0 {
		f.note("files in it are encrypted, so no check can read them")
	}
	if out > 0 {
		f.note("files in it would be unpacked outside the chosen folder")
	}
}

// Warnings about a file of an archive.
const (
	sayProgram   = "a double click runs it"
	sayEncrypted = "encrypted"
	sayOut       = "would be unpacked outside the folder"
	sayLink      = "a link to another file"
)

// say returns a warning about a name, or "".
func say(name string) string {
	clean := path.Clean(strings.ReplaceAll(name, `\`, "/"))
	switch ext := strings.ToLower(strings.TrimPrefix(filepath.Ext(strings.TrimRight(name, " .")), ".")); {
	case strings.HasPrefix(clean, "../"), clean == "..", strings.HasPrefix(clean, "/"), len(clean) > 1 && clean[1] == ':':
		return sayOut
	case ext != "" && strings.Contains(programs, " "+ext+" "):
		return sayProgram
	}
	return ""
}

func (l *Listing) add(m Member) {
	l.Total++
	l.Size += m.Size
	if len(l.Members) < maxMembers {
		if m.Say == "" {
			m.Say = say(m.Name)
		}
		if len(m.Name) > 1000 {
			m.Name = strings.ToValidUTF8(m.Name[:1000], "") + "…"
		}
		l.Members = append(l.Members, m)
	}
}

// listing reads the names of an archive.
func listing(data []byte) (l Listing, err error) {
	switch {
	case bytes.HasPrefix(data, []byte("PK\x03\x04")), bytes.HasPrefix(data, []byte("PK\x05\x06")):
		return zipListing(data)
	case bytes.HasPrefix(data, []byte("\x1f\x8b")):
		z, err := gzip.NewReader(bytes.NewReader(data))
		if err != nil {
			return l, err
		}
		// The attack: a few kilobytes that become gigabytes.
		l, err = tarListing(io.LimitReader(z, maxUnpacked))
		if len(l.Members) > 0 {
			return l, err
		}
		l.add(Member{Name: path.Base(or(z.Name, "(no name)")), Size: 0})
		return l, nil
	}
	return tarListing(bytes.NewReader(data))
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

func zipListing(data []byte) (l Listing, err error) {
	// The attack: entries without files. Each takes 46 bytes here and ten times that in memory.
	if bytes.Count(data, []byte("PK\x01\x02")) > maxCounted {
		l.add(Member{Name: "(more than 20000 files)"})
		return l, errors.New("too many files")
	}
	z, err := zip.NewReader(bytes.NewReader(data), int64(len(data)))
	if err != nil && !errors.Is(err, zip.ErrInsecurePath) {
		return l, err
	}
	for _, m := range z.File {
		if strings.HasSuffix(m.Name, "/") {
			continue
		}
		one := Member{Name: m.Name, Size: int64(min(m.UncompressedSize64, 1<<50))}
		if m.Flags&1 != 0 {
			one.Say = sayEncrypted
		}
		l.add(one)
	}
	return l, nil
}

func tarListing(r io.Reader) (l Listing, err error) {
	t := tar.NewReader(r)
	for l.Total < maxCounted {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return l, nil
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) {
			return l, err
		}
		switch h.Typeflag {
		case tar.TypeDir:
		case tar.TypeSymlink, tar.TypeLink:
			// The attack: a link out of the folder, and then a file through it.
			l.add(Member{Name: h.Name + " → " + h.Linkname, Say: sayLink})
		default:
			l.add(Member{Name: h.Name, Size: h.Size})
		}
	}
	return l, errors.New("too many files")
}
