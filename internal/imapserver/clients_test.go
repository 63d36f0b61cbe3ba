package imapserver

import (
	"bytes"
	"context"
	"encoding/pem"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"

	"postern/internal/mail"
	"postern/internal/mailbox"
)

// TestClients: programs that were not written for this server read the same inbox,
// unchanged, and verify its certificate.
func TestClients(t *testing.T) { //nolint:tparallel // a program finds what those before it did
	t.Parallel()
	f := setup(t, one(t), nil)
	dir := t.TempDir()
	cert := filepath.Join(dir, "cert.pem")
	b := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: f.srv.cfg.TLS.Certificates[0].Certificate[0]})
	if err := os.WriteFile(cert, b, 0o600); err != nil {
		t.Fatal(err)
	}
	f.receive(t, f.a, plain("First", "the first text"))
	f.receive(t, f.a, "From: =?utf-8?q?B=C3=B6b?= <bob@example.com>\nTo: alice@agents.test\nSubject: =?utf-8?q?Gr=C3=BC=C3=9Fe?=\nMessage-ID: <second@example.com>\nMIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=x\n\n--x\nContent-Type: text/plain; charset=utf-8\n\nhello second\n--x\nContent-Type: application/octet-stream; name*=utf-8''%C3%BC.bin\nContent-Disposition: attachment; filename*=utf-8''%C3%BC.bin\nContent-Transfer-Encoding: base64\n\naGVsbG8=\n--x--\n")
	program := func(name string, arg ...string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, name, arg...)
		_, port, _ := net.SplitHostPort(f.addr)
		_, clear, _ := net.SplitHostPort(f.clear)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "HOME="+dir, "PORT="+port, "CLEAR="+clear, "IMAP_USER="+f.a.Address, "KEY="+f.keyA.Reveal(), "CERT="+cert, "NODE_EXTRA_CA_CERTS="+cert, "TERM=xterm")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
		return string(out)
	}
	file := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		_, port, _ := net.SplitHostPort(f.addr)
		text = strings.NewReplacer("PORT", port, "USER", f.a.Address, "KEY", f.keyA.Reveal(), "CERT", cert, "DIR", dir).Replace(text)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}

	t.Run("Python's imaplib", func(t *testing.T) {
		script, err := filepath.Abs("../../test/mail/imap.py")
		if err != nil {
			t.Fatal(err)
		}
		if out := program("python3", script); !strings.Contains(out, "imaplib is content") {
			t.Errorf("it says %s", out)
		}
	})
	t.Run("imapflow", func(t *testing.T) {
		script, err := filepath.Abs("../../test/mail/imap.mjs")
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), "node", script)
		_, port, _ := net.SplitHostPort(f.addr)
		cmd.Env = append(os.Environ(), "PORT="+port, "IMAP_USER="+f.a.Address, "KEY="+f.keyA.Reveal(), "NODE_EXTRA_CA_CERTS="+cert)
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		r, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		var complaint bytes.Buffer
		cmd.Stderr = &complaint
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// It says when it waits for mail.
		buf := make([]byte, 4096)
		for {
			n, err := r.Read(buf)
			out.Write(buf[:n])
			if bytes.Contains(buf[:n], []byte("waiting")) {
				if err := f.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{f.a.Address}, Raw: []byte(strings.ReplaceAll(plain("Third", "while it waited"), "\n", "\r\n"))}, Remote: "192.0.2.1"}); err != nil {
					t.Error(err)
				}
			}
			if err != nil {
				break
			}
		}
		in.Close()
		if err := cmd.Wait(); err != nil || !strings.Contains(out.String(), "imapflow is content") {
			t.Errorf("%v: %s%s", err, out.String(), complaint.String())
		}
	})
	t.Run("mbsync", func(t *testing.T) {
		if err := os.Mkdir(filepath.Join(dir, "box"), 0o700); err != nil {
			t.Fatal(err)
		}
		rc := file("mbsyncrc", "IMAPAccount a\nHost localhost\nPort PORT\nUser USER\nPass KEY\nSSLType IMAPS\nCertificateFile CERT\n\nIMAPStore far\nAccount a\n\nMaildirStore near\nPath DIR/box/\nInbox DIR/box/INBOX\nSubFolders Verbatim\n\nChannel c\nFar :far:\nNear :near:\nPatterns INBOX Archive Sent Drafts Trash\nCreate Near\nExpunge None\nSync All\nSyncState *\n")
		program("mbsync", "-c", rc, "c")
		read := func() string {
			var all strings.Builder
			_ = filepath.WalkDir(filepath.Join(dir, "box"), func(path string, d os.DirEntry, err error) error {
				if err == nil && !d.IsDir() && !strings.HasPrefix(d.Name(), ".") {
					b, _ := os.ReadFile(path)
					all.Write(b)
				}
				return err
			})
			return all.String()
		}
		if got := read(); strings.Count(got, "hello second") != 1 || strings.Count(got, "while it waited") != 1 {
			t.Errorf("it has copied %s", got)
		}
		// A flag that is set here is set there, and a second run copies nothing.
		names, err := filepath.Glob(filepath.Join(dir, "box/INBOX/*/*"))
		if err != nil || len(names) == 0 {
			t.Fatal(names, err)
		}
		n := names[0]
		base, _, _ := strings.Cut(filepath.Base(n), ":2,")
		if err := os.Rename(n, filepath.Join(dir, "box/INBOX/cur", base+":2,FS")); err != nil {
			t.Fatal(err)
		}
		program("mbsync", "-c", rc, "c")
		if got := read(); strings.Count(got, "hello second") != 1 {
			t.Errorf("the second run copied anew: %s", got)
		}
		c := f.login(t, f.a.Address, f.keyA)
		c.ok("SELECT INBOX")
		if got := c.ok("SEARCH FLAGGED"); got == "* SEARCH\r\nOK SEARCH completed\r\n" {
			t.Errorf("the flag did not arrive: %s", got)
		}
	})
	t.Run("curl", func(t *testing.T) {
		_, port, _ := net.SplitHostPort(f.addr)
		if out := program("curl", "-sS", "--cacert", cert, "-u", f.a.Address+":"+f.keyA.Reveal(), "imaps://localhost:"+port+"/INBOX;MAILINDEX=1"); !strings.Contains(out, "From: Bob <bob@example.com>\r\n") {
			t.Errorf("it says %s", out)
		}
		_, port, _ = net.SplitHostPort(f.clear)
		if out := program("curl", "-sS", "--ssl-reqd", "--cacert", cert, "-u", f.a.Address+":"+f.keyA.Reveal(), "imap://localhost:"+port+"/", "-X", "STATUS INBOX (MESSAGES)"); !strings.Contains(out, "MESSAGES 3") {
			t.Errorf("with STARTTLS it says %s", out)
		}
	})
	t.Run("mutt", func(t *testing.T) {
		rc := file("muttrc", "set imap_user=USER imap_pass=KEY certificate_file=CERT folder=imaps://localhost:PORT/ spoolfile=+INBOX copy=no confirmappend=no confirmcreate=no quit=yes delete=yes move=no wait_key=no header_cache=\"\" imap_check_subscribed=yes\npush '<tag-pattern>~A<enter><tag-prefix><copy-message>DIR/mutt.mbox<enter><flag-message><quit>'\n")
		cmd := exec.CommandContext(t.Context(), "mutt", "-F", rc)
		cmd.Env = append(os.Environ(), "HOME="+dir, "TERM=xterm", "TMPDIR="+dir)
		tty, err := pty.Start(cmd)
		if err != nil {
			t.Fatal(err)
		}
		stop := time.AfterFunc(30*time.Second, func() { _ = cmd.Process.Kill() })
		defer stop.Stop()
		screen, _ := io.ReadAll(tty)
		if err := cmd.Wait(); err != nil {
			t.Fatalf("mutt: %v\n%q", err, screen)
		}
		got, err := os.ReadFile(filepath.Join(dir, "mutt.mbox"))
		if err != nil || strings.Count(string(got), "\nFrom ")+1 < 3 || !strings.Contains(string(got), "hello second") {
			t.Errorf("it has copied %s, %v\n%q", got, err, screen)
		}
	})
}
