package rootfs

import (
	"bytes"
	"crypto/sha1" //nolint:gosec // the format's checksum
	"encoding/binary"
	"strings"
	"unicode/utf16"

	"golang.org/x/sys/unix"

	"postern/internal/erofs"
)

// The guest leaves traces in its sandbox: names, the machine ID and the certificate of the
// sandbox's authority, see trust.go, identity.go and settings.go of package guest. They
// belong to one sandbox, and must not get into a template.

// traces returns the files that the guest writes in each sandbox. For a directory,
// everything in it is meant.
func traces() []string {
	return []string{
		"/run/postern", "/run/e2b", "/etc/hosts", "/etc/hostname", "/etc/machine-id", "/etc/resolv.conf",
		// The certificate, and the links to it that the guest and update-ca-certificates
		// make.
		"/usr/local/share/ca-certificates/postern.crt", "/etc/ssl/certs/65ab4b79.0", "/etc/ssl/certs/postern.pem",
		// Temporary files of the guest.
		"/etc/hosts.new", "/etc/hostname.new", "/etc/machine-id.new", "/usr/local/share/ca-certificates/postern.crt.new",
	}
}

// volatile returns logs and caches that contain times. With them, no two builds of one
// definition would have the same digest.
func volatile() []string {
	return []string{
		"/var/log/apt", "/var/log/dpkg.log", "/var/log/alternatives.log", "/var/log/bootstrap.log", "/var/log/fontconfig.log",
		"/var/cache/ldconfig/aux-cache", "/var/cache/apt/pkgcache.bin", "/var/cache/apt/srcpkgcache.bin",
		"/var/log/dnf.log", "/var/log/dnf.librepo.log", "/var/log/dnf.rpm.log", "/var/log/hawkey.log",
		"/tmp/node-compile-cache",
	}
}

// volatileAtHome returns such files in home directories.
func volatileAtHome() []string {
	return []string{".npm/_logs", ".npm/_cacache", ".npm/_update-notifier-last-checked", ".cache/pip", ".wget-hsts"}
}

// The guest's part of a certificate bundle, see trust.go of package guest.
const (
	trustBegin = "# Postern begins: the certificate authority of this sandbox.\n"
	trustEnd   = "# Postern ends.\n"
	trustSize  = 2048 // bytes, at most
	jksAlias   = "postern"
)

// maxTrust is the largest file, in bytes, that is searched for the guest's part. The guest
// does not change larger files.
const maxTrust = 8<<20 + trustSize

// untrace removes the traces of the sandbox from a tree that started as below. It restores
// files that were in below.
func (t *Tree) untrace(below *Tree) error {
	for _, path := range append(traces(), volatile()...) {
		t.restore(below, path)
	}
	homes := []string{"/root"}
	for _, name := range t.some("/home") {
		homes = append(homes, "/home/"+name)
	}
	for _, home := range homes {
		for _, path := range volatileAtHome() {
			t.restore(below, home+"/"+path)
		}
	}
	stores := trustBundles()
	for _, dir := range []string{"/usr/lib/jvm", "/opt", "/opt/java"} {
		for _, name := range t.some(dir) {
			stores = append(stores, dir+"/"+name+"/lib/security/cacerts", dir+"/"+name+"/jre/lib/security/cacerts")
		}
	}
	for _, path := range append(stores, "/etc/ssl/certs/java/cacerts") {
		if err := t.untrust(below, path); err != nil {
			return err
		}
	}
	return nil
}

// some returns the first names in a directory, as many as the guest reads.
func (t *Tree) some(dir string) []string {
	n, err := t.lookup(dir)
	if err != nil {
		return nil
	}
	names := sortedNames(n)
	return names[:min(len(names), 32)]
}

// restore restores the file of a path to its state in below.
func (t *Tree) restore(below *Tree, path string) {
	dir, name, _, err := t.resolve(path, false, false)
	if err != nil || name == "" || len(dir) == 0 {
		return // its directory does not exist
	}
	_, _, was, err := below.resolve(path, false, false)
	if err != nil || was == nil {
		delete(dir.last().Entries, name)
		return
	}
	// Copy the file: the agent may have linked a later path to this directory, and below
	// must not change.
	dir.last().Entries[name] = copied(was, map[*erofs.Node]*erofs.Node{})
}

// untrust removes the sandbox's authority from a certificate bundle or a trust store of
// Java.
func (t *Tree) untrust(below *Tree, path string) error {
	dir, name, n, _ := t.resolve(path, true, false)
	if n == nil || n.Kind() != unix.S_IFREG || n.Size > maxTrust {
		return nil
	}
	was, _ := below.lookup(path) // nil if it did not exist
	if was != nil && was.From == n.From && was.At == n.At && was.Size == n.Size && was.Text == n.Text {
		return nil
	}
	b, err := readNode(path, n, maxTrust)
	if err != nil {
		return err
	}
	clean, found := withoutTrust(b)
	if !found {
		clean, found = withoutJKS(b)
	}
	if !found {
		return nil
	}
	if was != nil && was.Kind() == unix.S_IFREG && was.Size <= maxTrust {
		old, err := readNode(path, was, maxTrust)
		if err != nil {
			return err
		}
		// The guest ends the last line before it adds its part.
		if bytes.Equal(bytes.TrimSuffix(old, []byte("\n")), bytes.TrimSuffix(clean, []byte("\n"))) {
			dir.last().Entries[name] = was
			return nil
		}
	}
	own := erofs.Node{Mode: n.Mode, UID: n.UID, GID: n.GID, Sec: n.Sec, Nsec: n.Nsec, Text: string(clean), Size: int64(len(clean))}
	dir.last().Entries[name] = &own
	return nil
}

// withoutTrust returns a bundle without the guest's parts, and whether it had any.
func withoutTrust(b []byte) ([]byte, bool) {
	var kept strings.Builder
	found := false
	for rest := string(b); ; {
		before, part, begins := strings.Cut(rest, trustBegin)
		kept.WriteString(before)
		if !begins {
			return []byte(kept.String()), found
		}
		// Without a bound the search would be quadratic, and the agent controls the size.
		rest = part
		end := strings.Index(part[:min(len(part), trustSize-len(trustBegin))], trustEnd)
		if end < 0 { // not the guest's
			kept.WriteString(trustBegin)
			continue
		}
		found, rest = true, part[end+len(trustEnd):]
	}
}

// withoutJKS returns a Java trust store in JKS format without the guest's entry, and
// whether it had one. See jks.go of package guest for the format.
func withoutJKS(b []byte) ([]byte, bool) {
	const head = 12 // magic number, version, count
	if len(b) < head+sha1.Size || binary.BigEndian.Uint32(b) != 0xfeedfeed {
		return nil, false
	}
	body := b[:len(b)-sha1.Size]
	if !bytes.Equal(jksSum(body), b[len(body):]) {
		return nil, false
	}
	out, count := bytes.Clone(body[:head]), uint32(0)
	for rest := body[head:]; len(rest) > 0; {
		size, alias := jksEntry(rest)
		if size == 0 {
			return nil, false
		}
		if alias != jksAlias {
			out = append(out, rest[:size]...)
			count++
		}
		rest = rest[size:]
	}
	if count == binary.BigEndian.Uint32(body[8:]) {
		return nil, false
	}
	binary.BigEndian.PutUint32(out[8:], count)
	return append(out, jksSum(out)...), true
}

// jksEntry returns the size and alias of the first entry. The size is 0 if the entry is not
// a complete trusted certificate.
func jksEntry(b []byte) (size int, alias string) {
	at := 0
	field := func(bytes int) []byte { // a length with so many bytes, and the value
		n := 0
		for range bytes {
			if at >= len(b) {
				at = len(b) + 1
				return nil
			}
			n = n<<8 | int(b[at])
			at++
		}
		if n > len(b)-at {
			at = len(b) + 1
			return nil
		}
		at += n
		return b[at-n : at]
	}
	if len(b) < 4 || binary.BigEndian.Uint32(b) != 2 {
		return 0, ""
	}
	at = 4
	name := field(2)
	at += 8 // the creation time
	field(2)
	field(4)
	if at > len(b) {
		return 0, ""
	}
	return at, string(name)
}

func jksSum(b []byte) []byte {
	h := sha1.New() //nolint:gosec // the format's
	for _, c := range utf16.Encode([]rune("changeit")) {
		_, _ = h.Write([]byte{byte(c >> 8), byte(c)}) // never fails
	}
	_, _ = h.Write([]byte("Mighty Aphrodite"))
	_, _ = h.Write(b)
	return h.Sum(nil)
}
