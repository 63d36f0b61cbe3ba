package gmail_test

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"postern/internal/gmail"
	"postern/internal/gmail/gmailtest"
)

const clients = "../../test/gmail"

func needClients(t *testing.T) {
	t.Helper()
	if _, err := os.Stat(clients + "/node_modules/@googleapis/gmail"); err != nil {
		t.Fatalf("%v: test/install-npm test/gmail installs it", err)
	}
}

// TestOfficialClient: the stand-in is one that Google's own client takes for Gmail.
func TestOfficialClient(t *testing.T) {
	t.Parallel()
	needClients(t)
	g, _ := newFixture(t)
	out, err := exec.CommandContext(t.Context(), "node", clients+"/client.mjs", g.URL, app.ID, string(app.Secret), g.Grant(app.ID, ann, gmail.Scope)).CombinedOutput()
	if err != nil || strings.TrimSpace(string(out)) != "ok" {
		t.Errorf("%v:\n%s", err, out)
	}
	if g.Revocations() != 1 {
		t.Error("the client's revocation did not arrive")
	}
}

// google is a proxy that leads to g whoever asks for one of Google's hosts over TLS, so
// that a program need not be changed. It returns the proxy's URL and the certificate's file.
func google(t *testing.T, g *gmailtest.Server) (proxy, ca string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cert := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, DNSNames: []string{"*.googleapis.com"}}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	ca = filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	listen := func() net.Listener {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
	u, err := url.Parse(g.URL)
	if err != nil {
		t.Fatal(err)
	}
	front := tls.NewListener(listen(), &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}})
	go http.Serve(front, httputil.NewSingleHostReverseProxy(u)) // until the listener ends
	l := listen()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				r := bufio.NewReader(c)
				req, err := http.ReadRequest(r)
				if err != nil || req.Method != http.MethodConnect || !strings.HasSuffix(req.Host, ".googleapis.com:443") {
					return
				}
				to, err := net.Dial("tcp", front.Addr().String())
				if err != nil {
					return
				}
				defer to.Close()
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
				go func() { _, _ = io.Copy(to, r) }()
				_, _ = io.Copy(c, to)
			}()
		}
	}()
	return "http://" + l.Addr().String(), ca
}

// TestGmailMCP: the widely used MCP server for Gmail, unchanged, works on the stand-in.
func TestGmailMCP(t *testing.T) {
	t.Parallel()
	needClients(t)
	g, _ := newFixture(t)
	g.AddAccount("bob@partner.example")
	proxy, ca := google(t, g)
	dir := t.TempDir()
	file := func(name string, v any) string {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	cmd := exec.CommandContext(t.Context(), "node", clients+"/node_modules/@gongrzhe/server-gmail-autoauth-mcp/dist/index.js")
	cmd.Env = append(os.Environ(), "HOME="+dir, "HTTPS_PROXY="+proxy, "NODE_EXTRA_CA_CERTS="+ca,
		"GMAIL_OAUTH_PATH="+file("keys.json", map[string]any{"installed": map[string]string{"client_id": app.ID, "client_secret": string(app.Secret)}}),
		"GMAIL_CREDENTIALS_PATH="+file("credentials.json", map[string]string{"refresh_token": g.Grant(app.ID, ann, gmail.Scope, gmailtest.ScopeSettings)}))
	cmd.Stderr = t.Output()
	session, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).Connect(t.Context(), &mcp.CommandTransport{Command: cmd}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	call := func(tool string, args map[string]any, want string) string {
		t.Helper()
		res, err := session.CallTool(t.Context(), &mcp.CallToolParams{Name: tool, Arguments: args})
		if err != nil {
			t.Fatalf("%s: %v", tool, err)
		}
		text := ""
		for _, c := range res.Content {
			if x, ok := c.(*mcp.TextContent); ok {
				text += x.Text
			}
		}
		if !strings.Contains(text, want) {
			t.Errorf("%s: got %q, want %q in it", tool, text, want)
		}
		return text
	}
	type m = map[string]any
	id := g.Deliver(ann, letter("the invoice", "Content-Type: multipart/mixed; boundary=b\r\n\r\n--b\r\nContent-Type: text/plain\r\n\r\nPay me\r\n--b\r\nContent-Type: application/pdf; name=bill.pdf\r\nContent-Disposition: attachment; filename=bill.pdf\r\nContent-Transfer-Encoding: base64\r\n\r\nJVBERi0=\r\n--b--\r\n"))
	call("search_emails", m{"query": "subject:invoice"}, id)
	call("read_email", m{"messageId": id}, "Pay me")
	call("list_email_labels", m{}, "INBOX")
	call("create_label", m{"name": "Bills"}, "Bills")
	call("get_or_create_label", m{"name": "Bills"}, "Bills")
	call("modify_email", m{"messageId": id, "addLabelIds": []string{"Label_1"}, "removeLabelIds": []string{"UNREAD"}}, "success")
	call("batch_modify_emails", m{"messageIds": []string{id}, "addLabelIds": []string{"STARRED"}}, "1")
	call("send_email", m{"to": []string{"bob@partner.example"}, "bcc": []string{"cy@partner.example"}, "subject": "Paid", "body": "Done", "threadId": id}, "success")
	call("draft_email", m{"to": []string{"bob@partner.example"}, "subject": "Later", "body": "x"}, "success")
	call("create_filter", m{"criteria": m{"from": "bob@partner.example"}, "action": m{"addLabelIds": []string{"Label_1"}}}, "created")
	call("list_filters", m{}, "No filters found")      // it looks for them in a field that Gmail does not have
	call("delete_email", m{"messageId": id}, "scopes") // gmail.modify may not, at Google either
	if got := g.LabelsOf(ann, id); strings.Join(got, " ") != "Bills CATEGORY_PERSONAL INBOX STARRED" {
		t.Errorf("labels: got %q", got)
	}
	if sent := g.Sent(ann); len(sent) != 1 || sent[0].Thread != id {
		t.Errorf("sent: got %d messages", len(sent))
	}
}
