package guest

import (
	"bufio"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"google.golang.org/protobuf/types/known/timestamppb"

	"postern/internal/guest/filesystempb"
)

// A listing is the state of one directory response.
type listing struct {
	users *userDB
	room  int // bytes of metadata that may still be added
}

func (s *Server) newListing() *listing { return &listing{users: &s.users, room: maxMetadata} }

// entry describes path. The caller has taken the user's rights.
func (l *listing) entry(path string) (*filesystempb.EntryInfo, error) {
	fi, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	return l.entryOf(path, fi), nil
}

// entryOf describes path, whose Lstat is fi. For a symbolic link kind, mode and
// metadata are its target's, since clients want to know whether they can read or
// list it; the permissions are the link's. A dangling link is a symlink.
func (l *listing) entryOf(path string, fi fs.FileInfo) *filesystempb.EntryInfo {
	e := &filesystempb.EntryInfo{
		Name:         utf8(filepath.Base(path)),
		Path:         utf8(path),
		Size:         fi.Size(),
		Mode:         uint32(fi.Mode().Perm()),
		Permissions:  fi.Mode().String(),
		ModifiedTime: timestamppb.New(fi.ModTime()),
		Type:         kind(fi.Mode()),
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		e.Owner, e.Group = l.users.names(st.Uid, st.Gid)
	}
	if fi.Mode()&fs.ModeSymlink == 0 {
		e.Metadata = metadata(path, &l.room)
	} else if target, err := filepath.EvalSymlinks(path); err == nil {
		e.SymlinkTarget = new(utf8(target))
		if to, err := os.Stat(target); err == nil {
			e.Type, e.Mode = kind(to.Mode()), uint32(to.Mode().Perm())
		}
		e.Metadata = metadata(target, &l.room)
	} else if target, err := os.Readlink(path); err == nil {
		e.SymlinkTarget = new(utf8(target))
	}
	return e
}

func kind(m fs.FileMode) filesystempb.FileType {
	switch {
	case m.IsDir():
		return filesystempb.FileType_FILE_TYPE_DIRECTORY
	case m&fs.ModeSymlink != 0:
		return filesystempb.FileType_FILE_TYPE_SYMLINK
	case m.IsRegular():
		return filesystempb.FileType_FILE_TYPE_FILE
	}
	return filesystempb.FileType_FILE_TYPE_UNSPECIFIED // a device, pipe or socket
}

// procField returns the value of a "Name: value" line in a file in /proc, in the
// unit of the file, or 0.
func procField(path, name string) int64 {
	f, err := os.Open(path)
	if err != nil {
		return 0
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		if v, ok := strings.CutPrefix(sc.Text(), name+":"); ok {
			n, _ := strconv.ParseInt(strings.Fields(v + " 0")[0], 10, 64)
			return n
		}
	}
	return 0
}
