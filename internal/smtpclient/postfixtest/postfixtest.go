// Package postfixtest runs a real Postfix for a test: Debian's, with its own
// configuration, queue and data below a temporary directory. It fails the test
// where Postfix is not installed or the test is not root.
package postfixtest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Domain is the domain that [Start]'s server takes mail for. It has the users b
// and c.
const Domain = "y.example"

// Config says what a Postfix does beyond keeping mail for its users.
type Config struct {
	// Routes are the domains that it sends on, each to a host:port.
	Routes map[string]string
	// LMTP is the host:port that takes the mail of its users; empty means
	// that maildirs of its own do.
	LMTP string
	// Submission is the host:port at which it takes the mail of its users over TLS, by
	// the passwords that a Dovecot knows; empty means that it does not.
	Submission string
	SASL       string // host:port of that Dovecot
	Cert, Key  string // files
}

// Start runs a private Postfix on the loopback until the test ends. It returns
// its address and the folder in which each user has a maildir.
func Start(t testing.TB) (addr, maildir string) {
	t.Helper()
	return Run(t, Config{})
}

// Run is [Start] with a configuration.
func Run(t testing.TB, c Config) (addr, maildir string) {
	t.Helper()
	bin, err := exec.LookPath("/usr/sbin/postfix")
	if err != nil {
		t.Fatal("postfix is not installed: DEBIAN_FRONTEND=noninteractive apt-get install --no-install-recommends postfix")
	}
	if os.Getuid() != 0 {
		t.Fatal("postfix needs root to start; run the tests as root")
	}
	// Not t.TempDir: Postfix runs as its own user and must be able to enter.
	dir, err := os.MkdirTemp("/tmp", "postern-postfix-")
	if err != nil {
		t.Fatal(err)
	}
	conf, queue, data, mailDir := dir+"/conf", dir+"/queue", dir+"/data", dir+"/mail"
	for _, d := range []string{dir, conf, queue, data, mailDir} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{data, mailDir} {
		if out, err := exec.CommandContext(context.Background(), "chown", "postfix", d).CombinedOutput(); err != nil {
			t.Fatalf("chown: %v: %s", err, out)
		}
	}
	uid, err := exec.CommandContext(context.Background(), "id", "-u", "postfix").Output()
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		// Below the ports that the system gives to whoever asks for any: no other
		// test takes it before Postfix does.
		addr = fmt.Sprintf("127.0.0.1:%d", 20_000+rand.IntN(12_000))
		var l net.Listener
		if l, err = net.Listen("tcp", addr); err == nil {
			l.Close()
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	routes, virtual := "", "virtual"
	for domain, next := range c.Routes {
		routes += fmt.Sprintf(" { %s = smtp:%s }", domain, bracket(next))
	}
	if routes != "" { // an empty table is an error
		routes = "inline:{" + routes + " }"
	}
	if c.LMTP != "" {
		virtual = "lmtp:inet:" + c.LMTP
	}
	main := fmt.Sprintf(`compatibility_level = 3.6
queue_directory = %s
data_directory = %s
maillog_file = %s/log
maillog_file_prefixes = /tmp
myhostname = mx.y.example
mydestination =
local_recipient_maps =
inet_interfaces = 127.0.0.1
inet_protocols = ipv4
mynetworks = 127.0.0.0/8
alias_maps =
virtual_mailbox_domains = y.example
virtual_mailbox_base = %s
virtual_mailbox_maps = inline:{ b@y.example=b/ c@y.example=c/ }
virtual_uid_maps = static:%s
virtual_gid_maps = static:%[5]s
virtual_minimum_uid = 1
smtputf8_enable = yes
message_size_limit = 40000000
virtual_mailbox_limit = 0
mailbox_size_limit = 0
default_transport = error
transport_maps = %s
virtual_transport = %s
smtp_tls_security_level = may
minimal_backoff_time = 5s
queue_run_delay = 5s
`, queue, data, dir, mailDir, strings.TrimSpace(string(uid)), routes, virtual)
	master := fmt.Sprintf(`%s inet n - n - - smtpd
pickup unix n - n 60 1 pickup
cleanup unix n - n - 0 cleanup
qmgr unix n - n 300 1 qmgr
tlsmgr unix - - n 1000? 1 tlsmgr
rewrite unix - - n - - trivial-rewrite
bounce unix - - n - 0 bounce
defer unix - - n - 0 bounce
error unix - - n - - error
retry unix - - n - - error
virtual unix - n n - - virtual
smtp unix - - n - - smtp
lmtp unix - - n - - lmtp
anvil unix - - n - 1 anvil
proxymap unix - - n - - proxymap
postlog unix-dgram n - n - 1 postlogd
`, addr)
	if c.Submission != "" {
		main += fmt.Sprintf("smtpd_sasl_type = dovecot\nsmtpd_sasl_path = inet:%s\nsmtpd_tls_cert_file = %s\nsmtpd_tls_key_file = %s\n", c.SASL, c.Cert, c.Key)
		master += c.Submission + ` inet n - n - - smtpd
  -o smtpd_tls_wrappermode=yes
  -o smtpd_sasl_auth_enable=yes
  -o smtpd_relay_restrictions=permit_sasl_authenticated,reject
  -o smtpd_recipient_restrictions=permit_sasl_authenticated,reject
`
	}
	for name, text := range map[string]string{"main.cf": main, "master.cf": master} {
		if err := os.WriteFile(filepath.Join(conf, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// Its output goes to a file: a pipe would be held open by its daemon.
	run := func(args ...string) error {
		f, err := os.Create(dir + "/out")
		if err != nil {
			return err
		}
		defer f.Close()
		cmd := exec.Command(bin, append([]string{"-c", conf}, args...)...)
		cmd.Stdout, cmd.Stderr = f, f
		return cmd.Run()
	}
	logs := func() string {
		out, _ := os.ReadFile(dir + "/out")
		log, _ := os.ReadFile(dir + "/log")
		return string(out) + string(log)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the log of postfix:\n%s", logs())
		}
		if err := run("stop"); err != nil {
			t.Errorf("stop postfix: %v\n%s", err, logs())
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := run("start"); err != nil {
		t.Fatalf("start postfix: %v\n%s", err, logs())
	}
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		if c, err := net.Dial("tcp", addr); err == nil {
			c.Close()
			return addr, mailDir
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatalf("postfix does not listen\n%s", logs())
	return "", ""
}

// bracket writes host:port as Postfix wants it where no MX is looked up.
func bracket(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	return "[" + host + "]:" + port
}
