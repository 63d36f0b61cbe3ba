package e2e

import (
	"bufio"
	"encoding/json"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"postern/internal/gmail/gmailtest"
	"postern/internal/mail"
)

const (
	gmailOwner  = "ann@gmail.example"
	gmailClient = "1-a.apps.googleusercontent.com"
)

// signsIn runs postern mailbox connect gmail as a person does who answers at Google as
// answer does, and returns what was printed.
func signsIn(t *testing.T, s *server, answer func(line string) bool, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), s.bin, append([]string{"mailbox", "connect", "gmail", "--client-id", gmailClient, "--data", s.data}, args...)...)
	cmd.Env = append(os.Environ(), "POSTERN_GMAIL_CLIENT_SECRET=s3cret")
	var out strings.Builder
	cmd.Stdout = &out
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	answered := false
	for sc := bufio.NewScanner(stderr); sc.Scan(); {
		said.WriteString(sc.Text() + "\n")
		if !answered {
			answered = answer(sc.Text())
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s%s", err, &said, &out)
	}
	return out.String()
}

// byDevice says yes on another device.
func byDevice(t *testing.T, g *gmailtest.Server) func(line string) bool {
	form := regexp.MustCompile(`open (\S+) and enter (\S+)`)
	return func(line string) bool {
		m := form.FindStringSubmatch(line)
		if m == nil {
			return false
		}
		res, err := (&http.Client{Timeout: time.Minute}).PostForm(g.URL+"/device", url.Values{"user_code": {m[2]}, "account": {gmailOwner}, "answer": {"allow"}})
		if err != nil || res.StatusCode != http.StatusOK {
			t.Error(err, res)
			return true
		}
		res.Body.Close()
		return true
	}
}

// byBrowser says yes in a browser, which Google then sends to the loopback address.
func byBrowser(t *testing.T, g *gmailtest.Server) func(line string) bool {
	return func(line string) bool {
		u, err := url.Parse(strings.TrimSpace(line))
		if err != nil || !strings.HasPrefix(u.Path, "/o/oauth2/") {
			return false
		}
		form := url.Values{"account": {gmailOwner}, "answer": {"allow"}}
		maps.Copy(form, u.Query())
		res, err := (&http.Client{Timeout: time.Minute}).PostForm(g.URL+"/consent", form)
		if err != nil {
			t.Error(err)
			return true
		}
		defer res.Body.Close()
		if b, _ := io.ReadAll(res.Body); !strings.Contains(string(b), "Go back to the terminal") {
			t.Errorf("the browser ends at %s: %s", res.Request.URL, b)
		}
		return true
	}
}

// TestGmail plays a person who connects a mailbox at Gmail, an agent that works in it, and
// what goes wrong between the server and Google.
func TestGmail(t *testing.T) {
	t.Parallel()
	g := gmailtest.Start()
	t.Cleanup(g.Close)
	g.AddClient(gmailtest.Client{ID: gmailClient, Secret: "s3cret", Devices: true})
	g.AddAccount(gmailOwner)
	letter := func(subject string) []byte {
		return []byte("From: Bob <bob@partner.example>\r\nTo: " + gmailOwner + "\r\nSubject: " + subject + "\r\nDate: Mon, 23 Nov 2026 10:00:00 +0000\r\nMessage-ID: <" + strings.ReplaceAll(subject, " ", ".") + "@partner.example>\r\n\r\nAbout " + subject + "\r\n")
	}
	first := g.Deliver(gmailOwner, letter("first question"))
	g.Label(gmailOwner, first, []string{"Work/Orders"}, nil)
	old := g.Deliver(gmailOwner, letter("old thing"))

	data := t.TempDir()
	flags := []string{"--gmail-url", g.URL, "--pool-max", "0", "--pool-min", "0"}
	s := start(t, data, flags...)
	out := signsIn(t, s, byDevice(t, g), "--device")
	key := inboxKeyForm.FindString(out)
	if key == "" || !strings.Contains(out, gmailOwner) {
		t.Fatalf("connected: %s", out)
	}

	a := &gmailAgent{t: t, s: s, key: key}
	a.untilFound("first question")
	a.untilFound("old thing")
	if list := a.tool("email_labels_list", nil); !strings.Contains(list, "work/orders") {
		t.Errorf("labels: %s", list)
	}
	id := a.untilFound("first question")
	if got := a.tool("email_message_get", map[string]any{"id": id}); !strings.Contains(got, "About first question") {
		t.Errorf("message: %s", got)
	}

	// What is proposed waits; what a person approved leaves through Gmail, byte for byte.
	sent := a.action("email_reply", map[string]any{"messageId": id, "body": "Yes.", "replyAll": false})
	blind := a.action("email_send", map[string]any{"to": []string{"cy@partner.example"}, "bcc": []string{"dee@partner.example"}, "subject": "Offer", "body": "Kohlrabi"})
	if n := len(g.Sent(gmailOwner)); n != 0 {
		t.Fatalf("%d messages left before a person decided", n)
	}
	a.approve(sent, "done")
	a.approve(blind, "done", "--seen", "hidden_recipient:dee@partner.example")
	left := g.Sent(gmailOwner)
	if len(left) != 2 || left[0].Thread != first {
		t.Fatalf("left: %d messages, the reply in thread %v, want %s", len(left), left, first)
	}
	a.same(sent, left[0].Raw, "bob@partner.example")
	a.same(blind, left[1].Raw, "cy@partner.example", "dee@partner.example")

	// Gmail has given its copies other Message-IDs; each is one message here all the same.
	eventually(t, "what left is in the inbox once", func() bool {
		got := a.tool("email_search", map[string]any{"q": "in:sent"})
		return strings.Count(got, `"id":"msg_`) == 2
	})

	// Archive and trash are applied at Gmail; what its owner does there arrives.
	a.approve(a.action("email_trash", map[string]any{"id": a.untilFound("old thing")}), "done")
	eventually(t, "it is in Gmail's trash", func() bool { return slices.Contains(g.LabelsOf(gmailOwner, old), "TRASH") })
	if got := s.outcome(a.action("email_archive", map[string]any{"id": id})); got != "done" { // it needs no approval
		t.Errorf("the archiving is %s", got)
	}
	eventually(t, "it is archived at Gmail", func() bool { return !slices.Contains(g.LabelsOf(gmailOwner, first), "INBOX") })
	g.Label(gmailOwner, first, []string{"STARRED"}, nil)
	eventually(t, "the star arrives", func() bool {
		return strings.Contains(a.tool("email_search", map[string]any{"q": "is:starred"}), "first question")
	})
	g.ExpireTokens()
	g.Deliver(gmailOwner, letter("second question"))
	a.untilFound("second question")

	// The server dies while Gmail has the message, and before its answer.
	crash := a.action("email_send", map[string]any{"to": []string{"eve@partner.example"}, "subject": "In between", "body": "once"})
	hold, held := make(chan struct{}), make(chan struct{})
	g.Fail(gmailtest.Fault{Path: "/send", Hold: hold, Held: held})
	if out, status := (shell{s: s}).run(t, "", "approve", crash); status != 0 && !strings.Contains(out, "carried out") {
		t.Fatal(out)
	}
	<-held
	_ = s.kill(syscall.SIGKILL)
	close(hold)
	eventually(t, "Gmail has sent it", func() bool { return len(g.Sent(gmailOwner)) == 3 })
	s = start(t, data, flags...)
	a.s = s
	if state := s.outcome(crash); state != "unknown" && state != "done" {
		t.Errorf("after a crash in between it is %s", state)
	}
	if n := len(g.Sent(gmailOwner)); n != 3 {
		t.Errorf("%d messages left, want 3: nothing is sent twice", n)
	}

	// Revoked at Google: a person must sign in, then what was approved leaves.
	g.Revoke(gmailOwner)
	late := a.action("email_send", map[string]any{"to": []string{"fay@partner.example"}, "subject": "Late", "body": "later"})
	shell{s: s}.run(t, "", "approve", late)
	eventually(t, "it says that a sign-in is needed", func() bool {
		out, _ := shell{s: s}.run(t, "", "show", late)
		return strings.Contains(out, "sign in again")
	})
	if out := signsIn(t, s, byBrowser(t, g), "--again", gmailOwner); !strings.Contains(out, "signed in again") {
		t.Errorf("sign in again: %s", out)
	}
	eventually(t, "it leaves after the sign-in", func() bool { return len(g.Sent(gmailOwner)) == 4 })
	eventually(t, "each that left is in the inbox once", func() bool {
		got := a.tool("email_search", map[string]any{"q": "in:sent", "limit": 50})
		return strings.Count(got, `"id":"msg_`) == 4
	})
	for _, r := range g.RefreshTokens() {
		if strings.Contains(s.log.String(), r) {
			t.Error("a refresh token is in the server's log")
		}
	}
}

// A gmailAgent works in the mailbox with the tools.
type gmailAgent struct {
	t   *testing.T
	s   *server
	key string
}

func (a *gmailAgent) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+a.key)
	return http.DefaultTransport.RoundTrip(r)
}

// tool calls a tool and returns its answer.
func (a *gmailAgent) tool(name string, args map[string]any) string {
	a.t.Helper()
	cs, err := mcp.NewClient(&mcp.Implementation{Name: "agent", Version: "1"}, nil).Connect(a.t.Context(),
		&mcp.StreamableClientTransport{Endpoint: "http://" + a.s.web + "/mcp", HTTPClient: &http.Client{Transport: a}, DisableStandaloneSSE: true}, nil)
	if err != nil {
		a.t.Fatal(err)
	}
	defer cs.Close()
	res, err := cs.CallTool(a.t.Context(), &mcp.CallToolParams{Name: name, Arguments: args})
	if err != nil {
		a.t.Fatalf("%s: %v", name, err)
	}
	b, err := json.Marshal(res)
	if err != nil {
		a.t.Fatal(err)
	}
	if res.IsError {
		a.t.Fatalf("%s %v: %s", name, args, b)
	}
	return string(b)
}

var actionForm = regexp.MustCompile(`act_[A-Z2-7]{26}`)

// action calls a tool that proposes, and returns the action.
func (a *gmailAgent) action(name string, args map[string]any) string {
	a.t.Helper()
	return actionForm.FindString(a.tool(name, args))
}

// untilFound waits until a search finds a subject, and returns the message.
func (a *gmailAgent) untilFound(subject string) (id string) {
	a.t.Helper()
	eventually(a.t, subject+" is found", func() bool {
		got := a.tool("email_search", map[string]any{"q": `subject:"` + subject + `" -in:sent`})
		id = idForm.FindString(got)
		return id != ""
	})
	return id
}

func (a *gmailAgent) approve(id, want string, ticks ...string) {
	a.t.Helper()
	shell{s: a.s}.must(a.t, append([]string{"approve", id}, ticks...), want)
}

// same fails the test unless raw is what was approved: the digest that the person saw is
// that of these bytes to these recipients, and a Bcc field stands before them for those
// that the header does not name.
func (a *gmailAgent) same(id string, raw []byte, to ...string) {
	a.t.Helper()
	var action struct{ Digest string }
	if status, err := call(a.s.local(), "GET", "http://x/v1/actions/"+id, "", nil, &action); err != nil || status != http.StatusOK {
		a.t.Fatal(status, err)
	}
	rest := string(raw)
	if len(to) > 1 {
		var ok bool
		if rest, ok = strings.CutPrefix(rest, "Bcc: "+to[1]+"\r\n"); !ok {
			a.t.Errorf("%s left without a Bcc field before it", id)
		}
	}
	got, err := mail.Envelope{From: gmailOwner, To: to, Raw: []byte(rest)}.Digest()
	if err != nil || got != action.Digest {
		a.t.Errorf("%s: what left has digest %s, approved was %s (%v)\n%s", id, got, action.Digest, err, raw)
	}
}

// TestBrowserGmail connects a mailbox in headless Chromium. Google's stand-in is another
// site for the browser.
func TestBrowserGmail(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Fatal(err)
	}
	g := gmailtest.StartOn(l)
	t.Cleanup(g.Close)
	g.AddAccount(gmailOwner)
	g.AddAccount("other@gmail.example")
	s := start(t, t.TempDir(), "--gmail-url", "http://"+l.Addr().String(), "--pool-max", "0", "--pool-min", "0")
	g.AddClient(gmailtest.Client{ID: gmailClient, Secret: "s3cret", Redirects: []string{"http://" + s.web + "/console/mailboxes/gmail/callback"}})
	out, err := exec.Command("node", "../browser/gmail.mjs", "http://"+s.web, s.link, t.TempDir(), gmailClient, "s3cret", gmailOwner).CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
}
