// Package dovecottest runs a real Dovecot for a test: Debian's, with its own
// configuration and mail below a temporary directory. It fails the test where Dovecot
// is not installed or the test is not root.
package dovecottest

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	mathrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Password is the password of every user.
const Password = "correct_horse"

// A Server is a running Dovecot.
type Server struct {
	IMAPS string // host:port, TLS from the first octet
	LMTP  string // host:port, which takes mail for every user
	SASL  string // host:port, at which Postfix asks about passwords
	Dir   string
	Cert  string // file of the certificate for 127.0.0.1 and localhost
	Key   string // file of its key
	Roots *x509.CertPool
}

// Config says what a Dovecot does differently from the usual.
type Config struct {
	Capability string // replaces the list of capabilities, "IMAP4rev1 UIDPLUS"; empty means Dovecot's own
}

// Start runs a private Dovecot on the loopback until the test ends. It has the folders
// Sent, Trash, Archive, Junk and Drafts.
func Start(t testing.TB, c Config) Server {
	t.Helper()
	bin, err := exec.LookPath("/usr/sbin/dovecot")
	if err != nil {
		t.Fatal("dovecot is not installed: run make deps-test")
	}
	// Not t.TempDir, which is closed to other users: Dovecot's processes have users of
	// their own.
	dir, err := os.MkdirTemp("/tmp", "postern-dovecot-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	for _, d := range []string{dir, dir + "/mail"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command("chown", "dovecot:dovecot", dir+"/mail").CombinedOutput(); err != nil {
		t.Fatalf("chown: %v: %s", err, out)
	}
	s := Server{IMAPS: freeAddr(t), LMTP: freeAddr(t), SASL: freeAddr(t), Dir: dir, Cert: dir + "/cert.pem", Key: dir + "/key.pem"}
	s.Roots = certificate(t, s.Cert, s.Key)
	if err := os.WriteFile(dir+"/dovecot.conf", []byte(configuration(s, c)), 0o644); err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	cmd := exec.Command(bin, "-F", "-c", dir+"/dovecot.conf")
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
		if t.Failed() {
			log, _ := os.ReadFile(dir + "/log")
			t.Logf("the log of dovecot:\n%s%s", said.String(), log)
		}
	})
	for _, addr := range []string{s.IMAPS, s.LMTP, s.SASL} {
		listens(t, addr)
	}
	return s
}

func configuration(s Server, c Config) string {
	_, imaps, _ := net.SplitHostPort(s.IMAPS)
	_, lmtp, _ := net.SplitHostPort(s.LMTP)
	_, sasl, _ := net.SplitHostPort(s.SASL)
	capability := ""
	if c.Capability != "" {
		capability = "imap_capability = " + c.Capability
	}
	return fmt.Sprintf(`base_dir = %[1]s/run
state_dir = %[1]s/state
log_path = %[1]s/log
protocols = imap lmtp
listen = 127.0.0.1
ssl = yes
ssl_cert = <%[2]s
ssl_key = <%[3]s
disable_plaintext_auth = no
auth_mechanisms = plain
auth_failure_delay = 0
mail_location = maildir:%[1]s/mail/%%n
mailbox_list_index = yes
first_valid_uid = 1
mail_uid = dovecot
mail_gid = dovecot
namespace inbox {
  inbox = yes
  mailbox Sent {
    auto = create
    special_use = \Sent
  }
  mailbox Trash {
    auto = create
    special_use = \Trash
  }
  mailbox Archive {
    auto = create
    special_use = \Archive
  }
  mailbox Junk {
    auto = create
    special_use = \Junk
  }
  mailbox Drafts {
    auto = create
    special_use = \Drafts
  }
}
passdb {
  driver = static
  args = password=%[4]s
}
userdb {
  driver = static
  args = uid=dovecot gid=dovecot home=%[1]s/mail/%%n allow_all_users=yes
}
service lmtp {
  inet_listener lmtp {
    address = 127.0.0.1
    port = %[5]s
  }
}
service auth {
  inet_listener {
    address = 127.0.0.1
    port = %[6]s
  }
}
service imap-login {
  chroot =
  inet_listener imap {
    port = 0
  }
  inet_listener imaps {
    address = 127.0.0.1
    port = %[7]s
    ssl = yes
  }
}
protocol imap {
  imap_idle_notify_interval = 30s
  mail_max_userip_connections = 100
  %[8]s
}
`, s.Dir, s.Cert, s.Key, Password, lmtp, sasl, imaps, capability)
}

// certificate writes a certificate for the loopback and its key, and returns the
// authorities that verify it.
func certificate(t testing.TB, certFile, keyFile string) *x509.CertPool {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "mail.y.example"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	for name, b := range map[string][]byte{certFile: text, keyFile: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret})} {
		if err := os.WriteFile(name, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(text)
	return pool
}

// freeAddr returns an address of the loopback below the ports that the system gives to
// whoever asks for any: no other test takes it before Dovecot does.
func freeAddr(t testing.TB) string {
	t.Helper()
	for range 100 {
		addr := fmt.Sprintf("127.0.0.1:%d", 20_000+mathrand.IntN(12_000))
		if l, err := net.Listen("tcp", addr); err == nil {
			l.Close()
			return addr
		}
	}
	t.Fatal("no free port")
	return ""
}

func listens(t testing.TB, addr string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if c, err := net.Dial("tcp", addr); err == nil {
			c.Close()
			return
		}
	}
	t.Fatalf("dovecot does not listen at %s", addr)
}

// Admin runs doveadm.
func (s Server) Admin(t testing.TB, args ...string) string {
	t.Helper()
	out, err := exec.Command("doveadm", append([]string{"-c", s.Dir + "/dovecot.conf"}, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("doveadm %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// Save puts a message into a folder of a user.
func (s Server) Save(t testing.TB, user, folder, raw string) {
	t.Helper()
	cmd := exec.Command("doveadm", "-c", s.Dir+"/dovecot.conf", "save", "-u", user, "-m", folder)
	cmd.Stdin = strings.NewReader(raw)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("doveadm save: %v: %s", err, out)
	}
}

// Messages returns the files of the messages in a folder of a user.
func (s Server) Messages(t testing.TB, user, folder string) (out [][]byte) {
	t.Helper()
	dir := filepath.Join(s.Dir, "mail", strings.SplitN(user, "@", 2)[0])
	if folder != "INBOX" {
		dir = filepath.Join(dir, "."+folder)
	}
	for _, sub := range []string{"new", "cur"} {
		names, _ := filepath.Glob(filepath.Join(dir, sub, "*"))
		for _, name := range names {
			b, err := os.ReadFile(name)
			if err != nil { // it has just moved
				continue
			}
			out = append(out, bytes.ReplaceAll(bytes.ReplaceAll(b, []byte("\r\n"), []byte("\n")), []byte("\n"), []byte("\r\n")))
		}
	}
	return out
}
