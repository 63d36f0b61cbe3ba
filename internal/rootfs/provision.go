package rootfs

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"postern/internal/erofs"
)

// The account that runs agents' code. Its name is E2B's.
const (
	defaultUser = "user"
	firstID     = 1000
	lastID      = 60000 // higher IDs belong to services and nobody
)

// maxAccounts bounds /etc/passwd and similar files, in bytes: the guest reads them too.
const maxAccounts = 1 << 20

// Files whose content does not depend on the image.
const (
	hosts = `127.0.0.1 localhost
::1 localhost ip6-localhost ip6-loopback
127.0.1.1 sandbox
10.0.0.1 postern.internal
`
	resolvConf = "nameserver 10.0.0.1\noptions timeout:5 attempts:2\n"
	// Sandboxes have no syslog.
	sudoers = "user ALL=(ALL:ALL) NOPASSWD: ALL\nDefaults !syslog\n"
)

// The paths of the bundles of public certificate authorities: of Debian and Alpine, Red
// Hat, Alpine again, SUSE. The guest adds the sandbox's authority to each, see trust.go of
// package guest.
const trustBundle = "/etc/ssl/certs/ca-certificates.crt"

func trustBundles() []string {
	return []string{trustBundle, "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem", "/etc/ssl/ca-bundle.pem"}
}

// Provision adds what every sandbox needs to the tree: an account for agents' code with
// its home directory, files for name resolution, the directories that the guest and E2B's
// clients expect, and mount points. It runs no program of the image, so images without a
// shell work too. It is idempotent. A build calls it before its first step.
//
// The image may be hostile: a link never leads out of the tree. If a file is too large or
// has the wrong type, the error wraps [ErrInvalid].
func (t *Tree) Provision() error {
	for _, step := range []func() error{t.directories, t.names, t.accounts, t.trust, t.placeGuest} {
		if err := step(); err != nil {
			return fmt.Errorf("prepare the image: %w", err)
		}
	}
	return nil
}

// directories creates the directories that each sandbox needs.
func (t *Tree) directories() error {
	// Mount points. A link in place of one would make the kernel mount elsewhere.
	for _, name := range []string{"proc", "sys", "dev", "run"} {
		if err := t.real(trail{t.root}, name); err != nil {
			return err
		}
	}
	// The guest, which is root, writes into these.
	for _, name := range []string{"postern", "e2b"} {
		if err := t.real(trail{t.root, t.root.Entries["run"]}, name); err != nil {
			return err
		}
	}
	for _, d := range []struct {
		path string
		mode uint32 // of a new directory
		set  bool   // apply mode to an existing directory, too
	}{
		{"/etc", 0o755, false},
		{"/root", 0o700, false},
		{"/run/postern", 0o755, true},
		{"/run/e2b", 0o755, true},
		{"/tmp", 0o1777, true},
		{"/var/tmp", 0o1777, true},
		{"/usr/local/bin", 0o755, false},
		{"/etc/sudoers.d", 0o755, false},
		{"/usr/local/share/ca-certificates", 0o755, false},
		{"/etc/ssl/certs", 0o755, false},
		{"/code", 0o777, true}, // E2B's
	} {
		n, err := t.makeDir(d.path, d.mode)
		if err != nil {
			return err
		}
		if d.set {
			n.Mode = unix.S_IFDIR | d.mode
		}
	}
	return nil
}

// real creates a directory unless there is one. It replaces a link to a directory.
func (t *Tree) real(dir trail, name string) error {
	if d := dir.last().Entries[name]; d != nil && d.Kind() == unix.S_IFDIR {
		return nil
	}
	_, err := t.put(dir, name, newDir())
	return err
}

// local lets the account of agents' code install programs in /usr/local. E2B makes it
// writable for all users, but other users must not replace programs that the agent runs.
// Only root may change /usr/local/sbin, where the guest is: the sticky bit of /usr/local
// keeps other users from replacing it.
func (t *Tree) local(uid, gid uint32) error {
	local, err := t.makeDir("/usr/local", 0o755)
	if err != nil {
		return err
	}
	sbin, err := t.makeDir("/usr/local/sbin", 0o755)
	if err != nil {
		return err
	}
	if err := walk("", local, func(_ string, n *erofs.Node) error {
		if n.Kind() == unix.S_IFDIR && n.UID == 0 && n != sbin {
			n.UID, n.GID = uid, gid
		}
		return nil
	}); err != nil {
		return err
	}
	if sbin != local { // equal if sbin is a link to it
		local.Mode, local.UID, local.GID = unix.S_IFDIR|0o1775, 0, gid
	}
	if sbin.UID == 0 {
		sbin.Mode = unix.S_IFDIR | 0o755
	}
	return nil
}

// names writes the files for name resolution, the machine ID and the rules of sudo.
func (t *Tree) names() error {
	for _, f := range []struct {
		name, content string
		mode          uint32
	}{
		{"/etc/hosts", hosts, 0o644},
		{"/etc/resolv.conf", resolvConf, 0o644}, // often a link made by systemd
		{"/etc/hostname", "sandbox\n", 0o644},
		// The guest writes each sandbox's own ID, but only if the file exists.
		{"/etc/machine-id", "", 0o444},
		{"/etc/sudoers.d/postern", sudoers, 0o440},
	} {
		if err := t.WriteFile(f.name, f.content, f.mode); err != nil {
			return err
		}
	}
	return nil
}

// accounts adds the account of agents' code, and root's if it is missing.
func (t *Tree) accounts() error {
	passwd, err := t.table("/etc/passwd")
	if err != nil {
		return err
	}
	group, err := t.table("/etc/group")
	if err != nil {
		return err
	}
	if !group.has("root") {
		group.add("root:x:0:")
	}
	if !passwd.has("root") {
		passwd.add("root:x:0:0:root:/root:" + t.shell())
	}
	old := passwd.row(defaultUser)
	var uid, gid int
	if old != nil { // one of our images, or an image with such an account
		uid, gid = number(old, 2), number(old, 3)
	} else {
		uid = passwd.freeFrom(2, firstID)
		if g := group.row(defaultUser); g != nil {
			gid = number(g, 2)
		} else {
			gid = group.freeFrom(2, uid)
			group.add(fmt.Sprintf("%s:x:%d:", defaultUser, gid))
		}
		if uid > lastID || gid > lastID {
			return fmt.Errorf("%w: /etc/passwd has no free ID from %d to %d", ErrInvalid, firstID, lastID)
		}
		passwd.add(fmt.Sprintf("%s:x:%d:%d::/home/%s:%s", defaultUser, uid, gid, defaultUser, t.shell()))
	}
	if uid < 0 || gid < 0 {
		return fmt.Errorf("%w: the account %q has no ID in /etc/passwd or /etc/group", ErrInvalid, defaultUser)
	}
	if err := errors.Join(t.store(passwd), t.store(group)); err != nil {
		return err
	}
	// A locked password. It does not expire, because it has no date of its last change.
	for name, line := range map[string]string{"/etc/shadow": ":!::0:99999:7:::", "/etc/gshadow": ":!::"} {
		s, err := t.table(name)
		if err != nil {
			return err
		}
		if s.missing && name == "/etc/gshadow" {
			continue
		}
		for _, who := range []string{"root", defaultUser} {
			if !s.has(who) && (who != "root" || s.missing) {
				s.add(who + line)
			}
		}
		if err := t.store(s); err != nil {
			return err
		}
	}
	code, err := t.lookup("/code")
	if err != nil {
		return err
	}
	code.UID, code.GID = uint32(uid), uint32(gid)
	if err := t.local(uint32(uid), uint32(gid)); err != nil {
		return err
	}
	if old != nil && (len(old) < 6 || old[5] != "/home/"+defaultUser) {
		return nil // the image chose another home
	}
	return t.home(uint32(uid), uint32(gid))
}

// home creates the home directory of the account, with the files of /etc/skel.
func (t *Tree) home(uid, gid uint32) error {
	if n, err := t.lookup("/home/" + defaultUser); err == nil && n.Kind() == unix.S_IFDIR {
		if n.UID == 0 {
			n.UID, n.GID = uid, gid
		}
		return nil
	}
	if _, err := t.makeDir("/home/"+defaultUser, 0o755); err != nil {
		return err
	}
	dir, _, _, err := t.resolve("/home/"+defaultUser+"/.", true, false)
	if err != nil {
		return err
	}
	home := dir.last()
	home.UID, home.GID = uid, gid
	skel, _ := t.lookup("/etc/skel")
	if skel == nil || skel.Kind() != unix.S_IFDIR {
		return nil
	}
	// Only files: links could put the home inside a directory of /etc/skel.
	for _, name := range slices.Sorted(maps.Keys(skel.Entries)) {
		c := skel.Entries[name]
		if home.Entries[name] != nil || c.Kind() == unix.S_IFDIR {
			continue
		}
		own := *c
		own.UID, own.GID = uid, gid
		if _, err := t.put(dir, name, &own); err != nil {
			return err
		}
	}
	return nil
}

// shell returns the shell of new accounts.
func (t *Tree) shell() string {
	for _, s := range []string{"/bin/bash", "/usr/bin/bash"} {
		if n, err := t.lookup(s); err == nil && n.Kind() == unix.S_IFREG && n.Mode&0o111 != 0 {
			return s
		}
	}
	return "/bin/sh"
}

// trust creates the certificate bundle that all tools are configured to use, unless the
// image has one. The guest adds the sandbox's authority to it.
func (t *Tree) trust() error {
	if _, err := t.lookup(trustBundle); err == nil {
		return nil
	}
	dir, base := split(trustBundle)
	d, err := t.makeDir(dir, 0o755)
	if err != nil {
		return err
	}
	for _, b := range trustBundles()[1:] {
		if n, err := t.lookup(b); err == nil && n.Kind() == unix.S_IFREG {
			d.Entries[base] = &erofs.Node{Mode: unix.S_IFLNK | 0o777, Text: b}
			return nil
		}
	}
	return t.WriteFile(trustBundle, "", 0o644)
}

// A table is a file such as /etc/passwd: rows of fields with colons between them.
type table struct {
	name    string
	text    string
	rows    [][]string
	missing bool // the tree has no such file
	changed bool
}

func (t *Tree) table(name string) (*table, error) {
	b, err := t.ReadFile(name, maxAccounts)
	if errors.Is(err, ErrNotExist) {
		return &table{name: name, missing: true}, nil
	} else if err != nil {
		return nil, err
	}
	s := &table{name: name, text: string(b)}
	for line := range strings.Lines(s.text) {
		s.rows = append(s.rows, strings.Split(strings.TrimRight(line, "\r\n"), ":"))
	}
	return s, nil
}

// row returns the first row with that name. Programs use the first one, too.
func (s *table) row(name string) []string {
	for _, r := range s.rows {
		if r[0] == name {
			return r
		}
	}
	return nil
}

func (s *table) has(name string) bool { return s.row(name) != nil }

func (s *table) add(line string) {
	if s.text != "" && !strings.HasSuffix(s.text, "\n") {
		s.text += "\n"
	}
	s.text += line + "\n"
	s.rows = append(s.rows, strings.Split(line, ":"))
	s.changed = true
}

// freeFrom returns the first free ID in a column.
func (s *table) freeFrom(column, from int) int {
	used := map[int]bool{}
	for _, r := range s.rows {
		used[number(r, column)] = true
	}
	for used[from] {
		from++
	}
	return from
}

// number returns the ID in a column of a row, or -1 if it is malformed.
func number(row []string, column int) int {
	if column < len(row) {
		if n, err := strconv.ParseUint(row[column], 10, 31); err == nil {
			return int(n)
		}
	}
	return -1
}

// store writes a changed table back. It follows links.
func (t *Tree) store(s *table) error {
	if !s.changed {
		return nil
	}
	n, err := t.lookup(s.name)
	if errors.Is(err, ErrNotExist) {
		mode := uint32(0o644)
		if strings.HasSuffix(s.name, "shadow") {
			mode = 0o600
		}
		return t.WriteFile(s.name, s.text, mode)
	} else if err != nil {
		return err
	}
	// The file may have other names, whose content must not change.
	dir, name, _, err := t.resolve(s.name, true, false)
	if err != nil {
		return err
	}
	own := *n
	own.From, own.At, own.Text, own.Size = nil, 0, s.text, int64(len(s.text))
	dir.last().Entries[name] = &own
	return nil
}
