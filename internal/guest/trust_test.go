package guest

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// newCertificate returns a certificate authority's certificate in PEM.
func newCertificate(t testing.TB, name string) string {
	t.Helper()
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: must(x509.CreateCertificate(rand.Reader, c, c, key.Public(), key))}))
}

// newTrust returns the trust stores of an image with these files. A value "-> x" is
// a symbolic link to x, "/" a directory.
func newTrust(t testing.TB, files map[string]string) trustStore {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if to, ok := strings.CutPrefix(content, "-> "); ok {
			err = errors.Join(err, os.Symlink(to, path))
		} else if content == "/" {
			err = errors.Join(err, os.MkdirAll(path, 0o755))
		} else {
			err = errors.Join(err, os.WriteFile(path, []byte(content), 0o640))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return trustStore{log: slog.New(slog.NewTextHandler(t.Output(), nil)), root: root}
}

func (t trustStore) mustInstall(tb testing.TB, certificate string) {
	tb.Helper()
	if err := t.install(context.Background(), certificate, ""); err != nil {
		tb.Fatal(err)
	}
}

// names returns the common names of the certificates in a bundle.
func names(t testing.TB, bundle string) string {
	t.Helper()
	var list []string
	for rest := []byte(bundle); ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			return strings.Join(list, " ")
		}
		list = append(list, must(x509.ParseCertificate(block.Bytes)).Subject.CommonName)
	}
}

func TestAuthorityIsTrustedByEveryBundleOfTheImage(t *testing.T) {
	public := newCertificate(t, "public")
	for name, c := range map[string]struct {
		files map[string]string
		want  map[string]string // names by file
	}{
		"Debian": {
			map[string]string{"etc/ssl/certs/ca-certificates.crt": public},
			map[string]string{"etc/ssl/certs/ca-certificates.crt": "public ours", "etc/ssl/certs/65ab4b79.0": "-> /usr/local/share/ca-certificates/postern.crt"},
		},
		"Alpine": {
			map[string]string{"etc/ssl/certs/ca-certificates.crt": public, "etc/ssl/cert.pem": "-> certs/ca-certificates.crt"},
			map[string]string{"etc/ssl/certs/ca-certificates.crt": "public ours", "etc/ssl/cert.pem": "-> certs/ca-certificates.crt"},
		},
		"Red Hat": {
			map[string]string{
				"etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem": public, "etc/pki/tls/certs/ca-bundle.crt": "-> ../../ca-trust/extracted/pem/tls-ca-bundle.pem",
				"etc/ssl/certs": "-> ../pki/tls/certs",
			},
			map[string]string{"etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem": "public ours", "etc/ssl/certs/ca-certificates.crt": "-> ca-bundle.crt"},
		},
		"SUSE":                     {map[string]string{"etc/ssl/ca-bundle.pem": public}, map[string]string{"etc/ssl/ca-bundle.pem": "public ours", "etc/ssl/certs/ca-certificates.crt": "-> ../ca-bundle.pem"}},
		"none":                     {nil, map[string]string{"etc/ssl/certs/ca-certificates.crt": "ours"}},
		"without a line end":       {map[string]string{"etc/ssl/certs/ca-certificates.crt": strings.TrimSpace(public)}, map[string]string{"etc/ssl/certs/ca-certificates.crt": "public ours"}},
		"a link to another file":   {map[string]string{"home/user/x": public, "etc/ssl/certs/ca-certificates.crt": "-> ../../../home/user/x"}, map[string]string{"home/user/x": "public"}},
		"a directory in its place": {map[string]string{"etc/ssl/certs/ca-certificates.crt": "/", "etc/ssl/cert.pem": public}, map[string]string{"etc/ssl/cert.pem": "public ours"}},
	} {
		t.Run(name, func(t *testing.T) {
			tr := newTrust(t, c.files)
			tr.mustInstall(t, "")
			tr.mustInstall(t, newCertificate(t, "former"))
			tr.mustInstall(t, newCertificate(t, "ours"))
			c.want["usr/local/share/ca-certificates/postern.crt"] = "ours"
			for file, want := range c.want {
				if to, err := os.Readlink(tr.path(file)); err == nil {
					if "-> "+to != want {
						t.Errorf("%s leads to %s, want %s", file, to, want)
					}
					continue
				}
				if got := names(t, readFile(t, tr.path(file))); got != want {
					t.Errorf("%s: certificates %q, want %q", file, got, want)
				}
			}
		})
	}
}

func TestFormerAuthorityIsGoneAlsoAfterTheBundleWasMadeAnew(t *testing.T) {
	const bundle = "etc/ssl/certs/ca-certificates.crt"
	public, more := newCertificate(t, "public"), newCertificate(t, "more")
	tr := newTrust(t, map[string]string{bundle: public})
	tr.mustInstall(t, newCertificate(t, "former"))
	// What update-ca-certificates does, and a user who adds one more.
	ours := readFile(t, tr.path(localCertificate))
	for name, content := range map[string]string{
		"in the middle": public + ours + more, "cut off": public + ours[:200] + "\n" + more + ours,
		"a begin alone": public + trustBegin + ours + more,
	} {
		if err := os.WriteFile(tr.path(bundle), []byte(content), 0o640); err != nil {
			t.Fatal(err)
		}
		tr.mustInstall(t, newCertificate(t, "ours"))
		got := readFile(t, tr.path(bundle))
		if n := names(t, strings.ReplaceAll(got, "\n"+trustBegin, "\n")); n != "public more ours" {
			t.Errorf("%s: certificates %q", name, n)
		}
		if fi := must(os.Stat(tr.path(bundle))); fi.Mode().Perm() != 0o640 {
			t.Errorf("%s: permissions %v", name, fi.Mode())
		}
	}
}

func TestInstallingTheSameAuthorityWritesNothing(t *testing.T) {
	tr := newTrust(t, map[string]string{"etc/ssl/certs/ca-certificates.crt": newCertificate(t, "public")})
	ours := newCertificate(t, "ours")
	tr.mustInstall(t, ours)
	stamp := func() (list []time.Time) {
		for _, f := range []string{trustBundle, localCertificate} {
			list = append(list, must(os.Stat(tr.path(f))).ModTime())
		}
		return list
	}
	was := stamp()
	time.Sleep(20 * time.Millisecond)
	tr.mustInstall(t, ours)
	if now := stamp(); !now[0].Equal(was[0]) || !now[1].Equal(was[1]) {
		t.Errorf("files of %v were written at %v", was, now)
	}
}

// TestTrustStoresThatASnapshotPrepared: code in a snapshot left something else in
// place of a bundle, to make root write to it or wait for it.
func TestTrustStoresThatASnapshotPrepared(t *testing.T) {
	tr := newTrust(t, map[string]string{"mnt/volume/secret": "of others\n", "etc/ssl/certs/x": "", "usr/local/share/ca-certificates/x": "", "etc/passwd": "root\n"})
	if err := errors.Join(
		unix.Mkfifo(tr.path(trustBundle), 0o644),
		os.Symlink("../../mnt/volume/secret", tr.path("/etc/ssl/cert.pem")),
		os.Link(tr.path("/mnt/volume/secret"), tr.path("/etc/ssl/ca-bundle.pem")),
		os.Symlink("../../../../mnt/volume/new", tr.path(localCertificate)),
	); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		tr.mustInstall(t, newCertificate(t, "ours"))
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("it waits for a pipe")
	}
	if got := readFile(t, tr.path("/mnt/volume/secret")); got != "of others\n" {
		t.Errorf("a file outside was written: %q", got)
	}
	if _, err := os.Lstat(tr.path("/mnt/volume/new")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file outside was created: %v", err)
	}
	// The sandbox's user may own the directory.
	if err := errors.Join(os.Remove(tr.path(localCertificate)), os.Symlink("../../../../etc/passwd", tr.path(localCertificate))); err != nil {
		t.Fatal(err)
	}
	tr.mustInstall(t, newCertificate(t, "another"))
	if got := readFile(t, tr.path("/etc/passwd")); got != "root\n" {
		t.Errorf("a file of root's was written: %q", got)
	}
}

func TestAFullDiskDoesNotKeepTheSandboxFromStarting(t *testing.T) {
	tr := newTrust(t, nil)
	if err := unix.Mount("none", tr.root, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("needs the right to mount: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(tr.root, 0) })
	public := newCertificate(t, "public")
	if err := errors.Join(os.MkdirAll(tr.path("/etc/ssl/certs"), 0o755), os.WriteFile(tr.path(trustBundle), []byte(public), 0o644)); err != nil {
		t.Fatal(err)
	}
	fill := func() { _ = os.WriteFile(tr.path("/full"), make([]byte, 64<<10), 0o644) }
	fill()
	tr.mustInstall(t, newCertificate(t, "ours"))
	if got := names(t, readFile(t, tr.path(trustBundle))); got != "public" && got != "public ours" {
		t.Errorf("certificates %q", got)
	}
	if err := os.Remove(tr.path("/full")); err != nil {
		t.Fatal(err)
	}
	tr.mustInstall(t, newCertificate(t, "former"))
	fill()
	tr.mustInstall(t, newCertificate(t, "ours"))
	if got := names(t, readFile(t, tr.path(trustBundle))); got != "public ours" {
		t.Errorf("a place that was prepared needs no room, but the certificates are %q", got)
	}
}

func TestInitInstallsTheAuthorityAndTellsEveryProcess(t *testing.T) {
	tr := newTrust(t, map[string]string{"etc/ssl/certs/ca-certificates.crt": newCertificate(t, "public")})
	g := newRig(t, func(c *Config) { c.TrustRoot = tr.root })
	environ := func() map[string]string {
		env := map[string]string{}
		for _, kv := range g.s.environ(account{}, map[string]string{"DENO_CERT": "/of/the/request"}) {
			k, v, _ := strings.Cut(kv, "=")
			env[k] = v
		}
		return env
	}
	if env := environ(); env["SSL_CERT_FILE"] != "" {
		t.Errorf("SSL_CERT_FILE is %q before there is an authority", env["SSL_CERT_FILE"])
	}
	init := func(token string, fields map[string]any) {
		t.Helper()
		if code, body := g.ask(token, "POST", "/init", string(must(json.Marshal(fields)))); code != 204 {
			t.Fatalf("init: %d %s", code, body)
		}
	}
	first, second := newCertificate(t, "first"), newCertificate(t, "second")
	init(testToken, map[string]any{"authority": first, "sandboxID": "i1", "envVars": map[string]string{"PIP_CERT": "/of/the/creator"}})
	if got := names(t, readFile(t, tr.path(trustBundle))); got != "public first" {
		t.Errorf("certificates %q", got)
	}
	want := trustVariables(true)
	maps.Copy(want, map[string]string{"PIP_CERT": "/of/the/creator", "DENO_CERT": "/of/the/request"})
	for k, v := range want {
		if got := environ()[k]; got != v {
			t.Errorf("%s is %q, want %q", k, got, v)
		}
	}
	// Variables of the system are not the creator's.
	if _, body := g.ask(testToken, "GET", "/envs", ""); strings.Contains(body, "SSL_CERT_FILE") {
		t.Errorf("/envs has them: %s", body)
	}
	init(testToken, map[string]any{"authority": second, "sandboxID": "i2", "restored": true, "channelSHA256": hashOf("other")})
	if got := names(t, readFile(t, tr.path(trustBundle))); got != "public second" {
		t.Errorf("after a fork: certificates %q", got)
	}
	init("other", map[string]any{"sandboxID": "i2", "restored": true}) // by a host without authorities
	if got := names(t, readFile(t, tr.path(trustBundle))); got != "public second" {
		t.Errorf("after a resume: certificates %q", got)
	}
	if code, _ := g.ask("other", "POST", "/init", `{"authority": "no certificate"}`); code != 400 {
		t.Errorf("a malformed certificate: %d", code)
	}
}

func TestToolsWithTheirOwnRootsKeepThemInAnImageWithout(t *testing.T) {
	tr := newTrust(t, nil)
	tr.mustInstall(t, newCertificate(t, "ours"))
	if tr.public() {
		t.Error("a bundle with our certificate alone is public")
	}
	env := trustVariables(false)
	if env["SSL_CERT_FILE"] != "" || env["REQUESTS_CA_BUNDLE"] != "" || env["NODE_EXTRA_CA_CERTS"] == "" {
		t.Errorf("variables %v", env)
	}
}

func TestBlockOfABundleHasOneSize(t *testing.T) {
	for _, c := range []string{"", newCertificate(t, "a"), newCertificate(t, strings.Repeat("long", 15))} {
		b := must(trustBlock(c))
		if len(b) != trustSize || !strings.HasSuffix(b, trustEnd) || strings.Contains(strings.ReplaceAll(b, c, ""), "-") {
			t.Errorf("%d bytes: %q", len(b), b)
		}
	}
	for _, c := range []string{"x", "x\n" + newCertificate(t, "a"), newCertificate(t, "a") + newCertificate(t, "b"), strings.ReplaceAll(newCertificate(t, "a"), "CERTIFICATE", "PRIVATE KEY")} {
		if _, err := trustBlock(c); err == nil {
			t.Errorf("accepted %.60q", c)
		}
	}
}

func TestJavaStoreKeepsItsCertificates(t *testing.T) {
	public := newCertificate(t, "public")
	der := func(c string) []byte { b, _ := pem.Decode([]byte(c)); return b.Bytes }
	store := string(formatJKS([]jksEntry{certificateEntry("debian:public", der(public))}))
	const debian, own = "etc/ssl/certs/java/cacerts", "opt/java/openjdk/lib/security/cacerts"
	tr := newTrust(t, map[string]string{
		"etc/ssl/certs/ca-certificates.crt": public + newCertificate(t, "more"), debian: store, own: "0\x82 a store in PKCS #12",
		"usr/lib/jvm/java-17/lib/security/cacerts": "-> ../../../../../../" + debian, "home/user/jdk/lib/security/cacerts": store,
	})
	tr.mustInstall(t, newCertificate(t, "former"))
	ours := newCertificate(t, "ours")
	tr.mustInstall(t, ours)
	for file, want := range map[string]string{debian: "debian:public postern", own: "system0 system1 postern", "home/user/jdk/lib/security/cacerts": "debian:public"} {
		entries, err := parseJKS([]byte(readFile(t, tr.path(file))))
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		var got []string
		for _, e := range entries {
			got = append(got, e.alias)
		}
		if s := strings.Join(got, " "); s != want {
			t.Errorf("%s: entries %q, want %q", file, s, want)
		}
		if last := entries[len(entries)-1]; strings.HasSuffix(want, "postern") && !bytes.HasSuffix(last.raw, der(ours)) {
			t.Errorf("%s: not our certificate", file)
		}
	}
	// Java itself reads it.
	keytool, err := exec.LookPath("keytool")
	if err != nil {
		t.Skip("no keytool")
	}
	out, err := exec.Command(keytool, "-list", "-keystore", tr.path(debian), "-storepass", jksPassword).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "postern, Jan 1, 2020, trustedCertEntry") || !strings.Contains(string(out), "2 entries") {
		t.Errorf("keytool: %v\n%s", err, out)
	}
}

func FuzzParseJKS(f *testing.F) {
	f.Add(formatJKS(nil))
	f.Add(formatJKS([]jksEntry{certificateEntry("a", []byte{1, 2, 3})}))
	f.Add([]byte("0\x82"))
	f.Fuzz(func(t *testing.T, b []byte) {
		// The checksum would keep the fuzzer out.
		if len(b) >= 12 {
			b = append(bytes.Clone(b), jksSum(b)...)
		}
		entries, err := parseJKS(b)
		if err != nil {
			return
		}
		if got := formatJKS(entries); !bytes.Equal(got, b) {
			t.Errorf("%x\nbecame\n%x", b, got)
		}
	})
}

func FuzzBundle(f *testing.F) {
	block, err := trustBlock("")
	if err != nil {
		f.Fatal(err)
	}
	f.Add("x\n" + block)
	f.Add(trustBegin + trustEnd + block + "y")
	f.Add(trustBegin + trustBegin + trustEnd)
	f.Fuzz(func(t *testing.T, b string) {
		rest := withoutTrust(b)
		if len(rest) > len(b) || strings.Contains(rest, block) && !strings.Contains(withoutTrust(rest), trustBegin) {
			t.Errorf("%q became %q", b, rest)
		}
	})
}

func BenchmarkInstall(b *testing.B) {
	tr := newTrust(b, map[string]string{"etc/ssl/certs/ca-certificates.crt": strings.Repeat(newCertificate(b, "public"), 300)})
	certs := []string{newCertificate(b, "a"), newCertificate(b, "b")}
	for i := 0; b.Loop(); i++ {
		tr.mustInstall(b, certs[i%2])
	}
}
