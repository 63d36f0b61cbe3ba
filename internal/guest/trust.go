package guest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// The host reads some requests of the sandbox, so programs must trust the sandbox's
// certificate authority. Its certificate is installed
//
//   - as a local certificate of Debian, from which update-ca-certificates makes the
//     bundle anew;
//   - at the end of each bundle of certificates that the image has;
//   - by its hash in the directory of certificates, for OpenSSL's default;
//   - in the trust stores of Java, see [javaStores];
//
// and variables point tools with a bundle of their own to it, see [trustVariables].
// A sandbox that is forked or started from a snapshot gets another authority, and
// then trusts the former one no more.

const (
	// localCertificate is where Debian and Alpine keep certificates that the
	// administrator adds.
	localCertificate = "/usr/local/share/ca-certificates/postern.crt"
	// trustBundle is the bundle of Debian and Alpine. It exists in each sandbox.
	trustBundle = "/etc/ssl/certs/ca-certificates.crt"
	// trustLink is where OpenSSL looks for a certificate by the hash of its subject,
	// which is the same for all sandboxes: openssl x509 -subject_hash.
	trustLink = "/etc/ssl/certs/65ab4b79.0"
)

// trustBundles returns the bundles of the distributions: Debian and Alpine, Red Hat,
// Alpine's other name, SUSE.
func trustBundles() []string {
	return []string{trustBundle, "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem", "/etc/ssl/ca-bundle.pem"}
}

// Our part of a bundle. Its size is fixed, and it is the bundle's end, so that
// another authority's certificate can be written over it in place: a bundle has
// 200 KB, and a start must not wait for a copy of it. Programs ignore text outside
// of PEM blocks. It has no hyphens, at which Java's parser expects a block.
const (
	trustBegin = "# Postern begins: the certificate authority of this sandbox.\n"
	trustEnd   = "# Postern ends.\n"
	trustSize  = 2048 // bytes
)

// The limits of files in the sandbox, which anybody may have written. In bytes.
const (
	maxBundle = 8 << 20
	maxStore  = 8 << 20
)

// trustBlock returns our part of a bundle with a certificate in PEM, or with none.
func trustBlock(certificate string) (string, error) {
	if certificate != "" {
		block, rest := pem.Decode([]byte(certificate))
		if block == nil || block.Type != "CERTIFICATE" || len(bytes.TrimSpace(rest)) > 0 || !strings.HasPrefix(certificate, "-----BEGIN") {
			return "", errors.New("not one certificate in PEM")
		}
		certificate = string(pem.EncodeToMemory(&pem.Block{Type: block.Type, Bytes: block.Bytes}))
	}
	room := trustSize - len(trustBegin) - len(certificate) - len(trustEnd)
	if room < 2 {
		return "", fmt.Errorf("the certificate has %d bytes in PEM; at most %d are allowed", len(certificate), trustSize-len(trustBegin)-len(trustEnd)-2)
	}
	return trustBegin + certificate + "#" + strings.Repeat(" ", room-2) + "\n" + trustEnd, nil
}

// trustVariables returns the environment that makes tools with a bundle of their own
// trust the sandbox's authority. The paths never change, so a service that started
// before the sandbox had its identity has the right ones.
//
// If the image had no bundle of its own, only the variables whose certificates are
// trusted in addition are set: with the others a tool that brings the public
// authorities along would know no other than ours.
func trustVariables(public bool) map[string]string {
	env := map[string]string{
		"NODE_EXTRA_CA_CERTS": localCertificate, // Node and Bun
		"DENO_CERT":           localCertificate,
	}
	if !public {
		return env
	}
	for _, name := range []string{
		"SSL_CERT_FILE", // OpenSSL, Go, uv, httpx, Ruby
		"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT", "CARGO_HTTP_CAINFO", "AWS_CA_BUNDLE",
		"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", // gRPC's libraries, and those of Google built on it
	} {
		env[name] = trustBundle
	}
	return env
}

// A trustStore installs the certificate of the sandbox's authority.
type trustStore struct {
	log  *slog.Logger
	root string // directory of etc, usr and opt: "/" but for tests; empty means that nothing is installed
	// kept are open files that end with our part, by name, for the next time; nil
	// means that none is kept. See kept.go for the reason.
	kept map[string]*keptFile
}

// path returns where a file of the sandbox is.
func (t trustStore) path(name string) string { return filepath.Join(t.root, name) }

// public reports whether the bundle holds more certificates than ours.
func (t trustStore) public() bool {
	if t.root == "" {
		return false
	}
	fi, err := os.Stat(t.path(trustBundle))
	return err == nil && fi.Size() > trustSize
}

// install puts a certificate in PEM in all stores, instead of the former one. None
// at all prepares the stores: it adds an empty part to them. It is idempotent.
//
// A store that cannot be written is logged, and is no error: a full disk or a file
// that a program broke must not keep the sandbox from starting. Its programs then
// refuse the connections that the host would read.
func (t trustStore) install(ctx context.Context, certificate, javaHome string) error {
	if t.root == "" {
		return nil
	}
	block, err := trustBlock(certificate)
	if err != nil {
		return fmt.Errorf("authority: %w", err)
	}
	failed := func(path string, err error) {
		if err != nil {
			t.log.WarnContext(ctx, "a trust store keeps its old content", "path", path, "error", err)
		}
	}
	failed(localCertificate, t.place(localCertificate, block, true))
	failed(trustBundle, t.bundle(block))
	for _, b := range trustBundles()[1:] {
		if err := t.place(b, block, false); !errors.Is(err, fs.ErrNotExist) {
			failed(b, err)
		}
	}
	failed(trustLink, t.link())
	if certificate != "" { // a JVM that runs before knows no authority
		for _, s := range t.javaStores(javaHome) {
			failed(s, t.java(s, certificate))
		}
	}
	return nil
}

// remove takes the certificate out of all stores. Our part of the bundles stays, without
// one, so that the files are the same in every sandbox.
func (t trustStore) remove(ctx context.Context, javaHome string) error {
	if t.root == "" {
		return nil
	}
	if err := t.install(ctx, "", ""); err != nil {
		return err
	}
	for _, s := range t.javaStores(javaHome) {
		if err := t.java(s, ""); err != nil {
			t.log.WarnContext(ctx, "a trust store keeps its old content", "path", s, "error", err)
		}
	}
	return nil
}

// bundle puts our part in the main bundle. If there is none it becomes a link to
// that of another distribution, or a file with our part alone.
func (t trustStore) bundle(block string) error {
	err := t.place(trustBundle, block, false)
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(t.path(trustBundle)), 0o755); err != nil {
		return err
	}
	for _, b := range trustBundles()[1:] {
		if _, err := os.Stat(t.path(b)); err != nil {
			continue
		}
		dir, err := filepath.EvalSymlinks(filepath.Dir(t.path(trustBundle))) // of Red Hat it is a link
		if err != nil {
			return err
		}
		to, err := filepath.Rel(dir, t.path(b))
		if err != nil {
			return err
		}
		return os.Symlink(to, t.path(trustBundle))
	}
	return t.place(trustBundle, block, true)
}

// link makes the link by the certificate's hash, if it does not exist.
func (t trustStore) link() error {
	err := os.Symlink(localCertificate, t.path(trustLink))
	if errors.Is(err, fs.ErrExist) || errors.Is(err, fs.ErrNotExist) { // made before; no such directory
		return nil
	}
	return err
}

// place puts our part at the end of the file name, instead of all our former parts.
// If the file does not exist it is created, or fs.ErrNotExist returned.
func (t trustStore) place(name, block string, create bool) error {
	var st unix.Stat_t
	err := unix.Lstat(t.path(name), &st) // a link may lead anywhere by now: see open
	if err == nil && t.again(name, st, block) {
		return nil
	}
	if err == nil && name == localCertificate && st.Mode&unix.S_IFMT == unix.S_IFLNK {
		// The sandbox's user owns the directory. A link to a file of root's must not make
		// this program write to it.
		if err = os.Remove(t.path(name)); err != nil {
			return err
		}
	}
	if k := t.kept[name]; k != nil {
		k.f.Close()
		delete(t.kept, name)
	}
	if errors.Is(err, fs.ErrNotExist) && !create {
		return err
	}
	path, f, err := t.open(name)
	if create && errors.Is(err, fs.ErrNotExist) {
		return replaceFile(t.path(name), block, 0o644)
	} else if err != nil {
		return err
	}
	defer func() {
		if f != nil {
			f.Close()
		}
	}()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if fi.Size() > maxBundle {
		return fmt.Errorf("it has %d bytes; at most %d are allowed", fi.Size(), maxBundle)
	}
	// The fast path: the file ends with our part. The kernel does not interrupt one
	// write by a read, and no program of the sandbox's owner has started yet.
	if at := fi.Size() - trustSize; at >= 0 {
		tail := make([]byte, trustSize)
		if _, err := f.ReadAt(tail, at); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if string(tail) == block || isTrust(tail) {
			if string(tail) != block {
				_, err = f.WriteAt([]byte(block), at)
			}
			if k := (&keptFile{f: f}); err == nil && t.kept != nil && unix.Fstat(int(f.Fd()), &k.st) == nil {
				t.kept[name], f = k, nil
			}
			return err
		}
	}
	old, err := io.ReadAll(io.LimitReader(f, maxBundle))
	if err != nil {
		return err
	}
	rest := withoutTrust(string(old))
	if rest != "" && !strings.HasSuffix(rest, "\n") {
		rest += "\n"
	}
	return replaceFile(path, rest+block, fi.Mode().Perm())
}

// isTrust reports whether the end of a bundle is our part.
func isTrust(tail []byte) bool {
	return bytes.HasPrefix(tail, []byte(trustBegin)) && bytes.HasSuffix(tail, []byte(trustEnd)) && bytes.Count(tail, []byte("-----BEGIN")) <= 1
}

// again puts our part over the former one in a kept file, if the name still leads to
// that file, given by its stat, and nothing else has happened to it. It was opened by
// [trustStore.open], so it is not a user's.
func (t trustStore) again(name string, st unix.Stat_t, block string) bool {
	k := t.kept[name]
	if k == nil || !sameFile(st, k.st) || st.Size != k.st.Size {
		return false
	}
	tail, at := make([]byte, trustSize), st.Size-trustSize
	if _, err := k.f.ReadAt(tail, at); err != nil && !errors.Is(err, io.EOF) || !isTrust(tail) {
		return false
	}
	if string(tail) == block {
		return true
	}
	_, err := k.f.WriteAt([]byte(block), at)
	return err == nil
}

// open opens the existing file name for reading and writing, and returns its path
// without links.
//
// This program is root and the files may come from a snapshot, in which anything may
// have been left: a link to a user's file or to a volume, which others read, or a
// pipe, which would block forever. So only regular files are opened, and a link must
// lead to a file in the system's own directories.
func (t trustStore) open(name string) (string, *os.File, error) {
	path, err := filepath.EvalSymlinks(t.path(name))
	if err != nil {
		return "", nil, err
	}
	in := func(dir string) bool { return strings.HasPrefix(path, t.path(dir)+"/") }
	if !slices.ContainsFunc([]string{"/etc", "/usr", "/opt"}, in) {
		return "", nil, fmt.Errorf("it leads to %.256q, which is not in /etc, /usr or /opt", path)
	}
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	if err != nil {
		return "", nil, err
	}
	fi, err := f.Stat()
	if err == nil {
		st, ok := fi.Sys().(*syscall.Stat_t)
		switch {
		case !fi.Mode().IsRegular():
			err = errors.New("it is not a regular file")
		case ok && st.Nlink > 1:
			// The other name may be anywhere.
			err = errors.New("the file has several names")
		}
	}
	if err != nil {
		f.Close()
		return "", nil, err
	}
	return path, f, nil
}

// withoutTrust returns a bundle without our parts. A part without an end is removed
// up to the next line that begins a part or, if there is none, left: it is not ours.
func withoutTrust(bundle string) string {
	var kept strings.Builder
	for {
		before, part, found := strings.Cut(bundle, trustBegin)
		kept.WriteString(before)
		if !found {
			return kept.String()
		}
		_, after, ended := strings.Cut(part, trustEnd)
		if !ended || len(part)-len(after)+len(trustBegin) > trustSize {
			kept.WriteString(trustBegin)
			after = part
		}
		bundle = after
	}
}

// javaStores returns the trust stores of the Java machines in the sandbox: Debian's
// common one, and those of the machines on PATH, in JAVA_HOME, below /usr/lib/jvm
// and in the places of images. One that is installed later as a package takes its
// certificates from the system's. One that is unpacked later from an archive has a
// store of its own, and does not trust the authority until the next start of the
// sandbox.
//
// A variable, JAVA_TOOL_OPTIONS, would reach each of them. But each JVM writes a
// line about it to its standard error, which agents take for output of the program.
func (t trustStore) javaStores(home string) []string {
	var list []string
	// One call says that there is nothing. To resolve links takes one for each part of
	// a path.
	exists := func(name string) bool {
		var st unix.Stat_t
		return unix.Stat(t.path(name), &st) == nil
	}
	add := func(dir string) {
		for _, name := range []string{"lib/security/cacerts", "jre/lib/security/cacerts"} {
			if path, err := filepath.EvalSymlinks(filepath.Join(dir, name)); err == nil {
				list = append(list, path)
			}
		}
	}
	if name := "/etc/ssl/certs/java/cacerts"; exists(name) {
		if path, err := filepath.EvalSymlinks(t.path(name)); err == nil {
			list = append(list, path)
		}
	}
	for dir := range strings.SplitSeq(defaultPath, ":") {
		if !exists(filepath.Join(dir, "java")) {
			continue
		}
		if path, err := filepath.EvalSymlinks(t.path(filepath.Join(dir, "java"))); err == nil {
			add(filepath.Join(filepath.Dir(path), ".."))
		}
	}
	if filepath.IsAbs(home) {
		add(t.path(home))
	}
	for _, pattern := range []string{"/usr/lib/jvm/*", "/opt/java/*", "/opt/jdk*"} {
		if !exists(filepath.Dir(pattern)) {
			continue
		}
		dirs, _ := filepath.Glob(t.path(pattern)) // the patterns are well-formed
		for _, dir := range dirs[:min(len(dirs), 32)] {
			add(dir)
		}
	}
	slices.Sort(list)
	list = slices.Compact(list)
	for i, path := range list {
		list[i] = "/" + strings.TrimPrefix(strings.TrimPrefix(path, t.root), "/")
	}
	return list
}

// java puts a certificate in PEM in a trust store of Java, instead of the former one. An
// empty one only removes the former one, from a store in JKS.
// A store in another format than JKS is replaced by one in JKS with the certificates
// of the system's bundle: Java reads both formats under either name.
func (t trustStore) java(name, certificate string) error {
	path, f, err := t.open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	old, err := io.ReadAll(io.LimitReader(f, maxStore+1))
	if err != nil {
		return err
	}
	if len(old) > maxStore {
		return fmt.Errorf("it has more than %d bytes", maxStore)
	}
	ours, _ := pem.Decode([]byte(certificate)) // checked by trustBlock
	entries, err := parseJKS(old)
	if errors.Is(err, errNotJKS) && certificate == "" {
		return nil // ours is in no other format
	}
	if errors.Is(err, errNotJKS) {
		if entries, err = t.bundleEntries(); err == nil && len(entries) == 0 {
			err = errors.New("it is not in JKS, and the system has no certificates to make another one from")
		}
	}
	if err != nil {
		return err
	}
	entries = slices.DeleteFunc(entries, func(e jksEntry) bool { return e.alias == jksAlias })
	if ours != nil {
		entries = append(entries, certificateEntry(jksAlias, ours.Bytes))
	}
	fresh := formatJKS(entries)
	if bytes.Equal(old, fresh) {
		return nil
	}
	return replaceFile(path, string(fresh), cmp.Or(fi.Mode().Perm(), 0o644))
}

// bundleEntries returns the certificates of the system's bundle, without ours.
func (t trustStore) bundleEntries() ([]jksEntry, error) {
	_, f, err := t.open(trustBundle)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxBundle))
	if err != nil {
		return nil, err
	}
	var list []jksEntry
	for rest := []byte(withoutTrust(string(b))); ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			return list, nil
		}
		if block.Type == "CERTIFICATE" {
			list = append(list, certificateEntry(fmt.Sprintf("system%d", len(list)), block.Bytes))
		}
	}
}
