package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// userName is what Debian's useradd takes for a name.
var userName = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,31}$`)

// The IDs of users that are made, as in Debian's /etc/login.defs.
const (
	firstUID = 1000
	lastUID  = 59999
)

// maxUserFile bounds the files with users and groups, in bytes.
const maxUserFile = 4 << 20

// addUser makes a user and a group of the same name, with a home that has a copy of
// /etc/skel, unless there is a user of that name. It needs no program of the image. With
// sudo the user may become root without a password, if the image has sudo.
//
// Root is "/" but for tests.
func addUser(root, name string, sudo bool) error {
	if !userName.MatchString(name) {
		return fmt.Errorf("user %.64q: a name has 1 to 32 lower-case letters, digits, \"_\" and \"-\", and does not begin with a digit or \"-\"", name)
	}
	at := func(p string) string { return filepath.Join(root, p) }
	passwd, err := readUserFile(at("/etc/passwd"))
	if err != nil {
		return err
	}
	group, err := readUserFile(at("/etc/group"))
	if err != nil {
		return err
	}
	if line := lineOf(passwd, name); line == nil {
		gid := 0
		if g := lineOf(group, name); len(g) > 2 {
			if gid, err = strconv.Atoi(g[2]); err != nil {
				return fmt.Errorf("group %s has no number in /etc/group", name)
			}
		}
		uid, err := freeID(passwd, group, gid == 0)
		if err != nil {
			return err
		}
		if gid == 0 {
			gid = uid
			if err := appendLine(at("/etc/group"), fmt.Sprintf("%s:x:%d:", name, gid), 0o644); err != nil {
				return err
			}
			if err := appendIfThere(at("/etc/gshadow"), name+":!::"); err != nil {
				return err
			}
		}
		home := "/home/" + name
		if err := appendIfThere(at("/etc/shadow"), name+":!:19000:0:99999:7:::"); err != nil {
			return err
		}
		if err := appendLine(at("/etc/passwd"), fmt.Sprintf("%s:x:%d:%d::%s:%s", name, uid, gid, home, loginShell(root)), 0o644); err != nil {
			return err
		}
		if err := makeHome(root, home, uid, gid); err != nil {
			return err
		}
	}
	if !sudo {
		return nil
	}
	if err := os.MkdirAll(at("/etc/sudoers.d"), 0o750); err != nil {
		return err
	}
	return replaceFile(at("/etc/sudoers.d/postern-"+name), name+" ALL=(ALL:ALL) NOPASSWD: ALL\n", 0o440)
}

// readUserFile returns the lines of a file of users or groups. No file means no lines.
func readUserFile(p string) ([][]string, error) {
	fi, err := os.Stat(p)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if !fi.Mode().IsRegular() || fi.Size() > maxUserFile {
		return nil, fmt.Errorf("%s is not a regular file of at most %d bytes", p, maxUserFile)
	}
	b, err := os.ReadFile(p)
	if err != nil {
		return nil, err
	}
	var lines [][]string
	for l := range strings.Lines(string(b)) {
		lines = append(lines, strings.Split(strings.TrimRight(l, "\r\n"), ":"))
	}
	return lines, nil
}

func lineOf(lines [][]string, name string) []string {
	for _, l := range lines {
		if l[0] == name {
			return l
		}
	}
	return nil
}

// freeID returns the next number after those of users, and of groups if they count.
func freeID(passwd, group [][]string, groups bool) (int, error) {
	used := map[int]bool{}
	all := passwd
	if groups {
		all = append(append([][]string{}, passwd...), group...)
	}
	for _, l := range all {
		if len(l) > 2 {
			if n, err := strconv.Atoi(l[2]); err == nil {
				used[n] = true
			}
		}
	}
	for n := firstUID; n <= lastUID; n++ {
		if !used[n] {
			return n, nil
		}
	}
	return 0, fmt.Errorf("all user IDs from %d to %d are taken", firstUID, lastUID)
}

// appendLine adds a line to a file, which is made with perm if it does not exist. The
// file keeps its owner and mode.
func appendLine(p, line string, perm fs.FileMode) error {
	f, err := os.OpenFile(p, os.O_RDWR|os.O_CREATE, perm)
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if !fi.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", p)
	}
	if n := fi.Size(); n > 0 {
		last := make([]byte, 1)
		if _, err := f.ReadAt(last, n-1); err != nil {
			return err
		}
		if last[0] != '\n' {
			line = "\n" + line
		}
	}
	_, err = f.WriteAt([]byte(line+"\n"), fi.Size())
	return errors.Join(err, f.Close())
}

func appendIfThere(p, line string) error {
	if _, err := os.Stat(p); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return appendLine(p, line, 0o640)
}

// loginShell returns bash, or what the image has instead.
func loginShell(root string) string {
	for _, s := range []string{"/bin/bash", "/bin/sh"} {
		if _, err := os.Stat(filepath.Join(root, s)); err == nil {
			return s
		}
	}
	return "/bin/bash"
}

// makeHome makes a home with a copy of /etc/skel. One that exists is left as it is.
func makeHome(root, home string, uid, gid int) error {
	dir := filepath.Join(root, home)
	if _, err := os.Lstat(dir); err == nil {
		return nil
	}
	if err := makeDirs(filepath.Dir(dir), 0, 0); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	if err := os.Lchown(dir, uid, gid); err != nil {
		return err
	}
	to, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer to.Close()
	from, err := os.OpenRoot(filepath.Join(root, "/etc/skel"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer from.Close()
	return fs.WalkDir(from.FS(), ".", func(rel string, d fs.DirEntry, err error) error {
		if err != nil || rel == "." {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		switch {
		case fi.IsDir():
			err = to.Mkdir(rel, fi.Mode().Perm())
		case fi.Mode()&fs.ModeSymlink != 0:
			var link string
			if link, err = from.Readlink(rel); err == nil {
				err = to.Symlink(link, rel)
			}
		case fi.Mode().IsRegular() && fi.Size() <= maxUserFile:
			var b []byte
			if b, err = from.ReadFile(rel); err == nil {
				err = to.WriteFile(rel, b, fi.Mode().Perm())
			}
		default:
			return nil
		}
		if err != nil {
			return err
		}
		return to.Lchown(rel, uid, gid)
	})
}
