package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/api"
)

// gmailSecretVariable is the environment variable with the secret of an OAuth client.
const gmailSecretVariable = "POSTERN_GMAIL_CLIENT_SECRET" //nolint:gosec // a name

const gmailHelp = `
Connects a mailbox at Gmail. You need an OAuth client of your own, of the type
"Desktop app"; docs/tasks/connect-gmail.md says how to make one. Give the file
that Google offers for download, or the client's ID and, in the environment
variable ` + gmailSecretVariable + `, its secret.

It prints an address to open in a browser on this machine. If the browser is on
another machine, open it there all the same: at the end the browser cannot load
a page of 127.0.0.1. Copy that page's address from the browser and paste it here.

--device signs in on another device by a short code. Google allows that for few
OAuth clients and refuses it for Gmail; it says so then.`

// A gmailTool is the command with its flags.
type gmailTool struct {
	file, id   string
	device     bool
	again      string
	name, mode string
	since      string
	most       int
}

func gmailCommand(c *Config) *command {
	t := &gmailTool{}
	return &command{
		use: "gmail [ADDRESS]", short: "connect a mailbox at Gmail by a sign-in at Google", long: gmailHelp, facts: true,
		example: "postern mailbox connect gmail --client-file client_secret.json\npostern mailbox connect gmail --client-file client_secret.json --again ann@gmail.com",
		flags: func(fs *pflag.FlagSet) {
			fs.StringVar(&t.file, "client-file", "", "`file` of the OAuth client, as Google's console offers it for download")
			fs.StringVar(&t.id, "client-id", "", "`ID` of the OAuth client, instead of the file; its secret is in $"+gmailSecretVariable)
			fs.BoolVar(&t.device, "device", false, "sign in on another device, by a code")
			fs.StringVar(&t.again, "again", "", "sign in again for the connected mailbox with this `address`")
			fs.StringVar(&t.name, "display-name", "", "`name` of the inbox")
			fs.StringVar(&t.mode, "mode", "", "oversight `mode` of the inbox (default gated_send)")
			fs.StringVar(&t.since, "since", "", "take in only messages from this `day` on, as in 2026-01-31")
			fs.IntVar(&t.most, "most", 0, "take in at most this many `messages` at first, the newest (default 1000)")
		},
		run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
			if len(args) > 1 {
				return fmt.Errorf("%w: want at most ADDRESS, got %d arguments", errUsage, len(args))
			}
			return t.connect(ctx, l, strings.Join(args, ""), out)
		}),
	}
}

// client returns the OAuth client that the flags name.
func (t *gmailTool) client() (in api.NewGmailSignIn, err error) {
	if (t.file == "") == (t.id == "") {
		return in, fmt.Errorf("%w: give --client-file or --client-id; docs/tasks/connect-gmail.md says how to make an OAuth client", errUsage)
	}
	if t.file == "" {
		return api.NewGmailSignIn{ClientID: t.id, ClientSecret: os.Getenv(gmailSecretVariable)}, nil
	}
	f, err := os.Open(t.file)
	if err != nil {
		return in, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 1<<16))
	if err != nil {
		return in, fmt.Errorf("read OAuth client: %w", err)
	}
	type client struct {
		ID     string `json:"client_id"`
		Secret string `json:"client_secret"`
	}
	var file struct{ Installed, Web *client }
	if json.Unmarshal(b, &file) != nil || file.Installed == nil && file.Web == nil {
		return in, fmt.Errorf("--client-file: %s is not the file of an OAuth client that Google's console offers for download", t.file)
	}
	if file.Installed == nil {
		return in, errors.New("--client-file: this OAuth client is of the type Web application, which is for the console; make one of the type Desktop app")
	}
	return api.NewGmailSignIn{ClientID: file.Installed.ID, ClientSecret: file.Installed.Secret}, nil
}

func (t *gmailTool) connect(ctx context.Context, l *local, address string, out *output) error {
	in, err := t.client()
	if err != nil {
		return err
	}
	n := api.NewGmailMailbox{Connection: t.again, DisplayName: t.name, Mode: api.Mode(t.mode), Most: t.most}
	if t.since != "" {
		day, err := time.ParseInLocation(time.DateOnly, t.since, time.Local) //nolint:gosmopolitan // the person's day
		if err != nil {
			return fmt.Errorf("%w: --since: %q is not a day as in 2026-01-31", errUsage, t.since)
		}
		n.Since = &day
	}
	if in.LoginHint = address; address == "" {
		in.LoginHint = t.again
	}
	var made api.GmailMailbox
	if t.device {
		made, err = t.onDevice(ctx, l, in, n)
	} else {
		made, err = t.inBrowser(ctx, l, in, n)
	}
	if err != nil {
		return err
	}
	if out.json {
		return out.object(made)
	}
	if made.Key == "" {
		_, err = fmt.Fprintf(out, "%s is signed in again\n", made.Address)
		return err
	}
	_, err = fmt.Fprintf(out, "%s  %s\nkey   %s\n%s\nIts mail is imported now, the newest first.\n", made.Address, made.Inbox, made.Key, made.Notice)
	return err
}

// onDevice lets the person sign in on another device.
func (t *gmailTool) onDevice(ctx context.Context, l *local, in api.NewGmailSignIn, n api.NewGmailMailbox) (api.GmailMailbox, error) {
	s, err := l.api.Gmail.SignIn(ctx, in)
	if err != nil {
		return api.GmailMailbox{}, err
	}
	fmt.Fprintf(os.Stderr, "On another device open %s and enter %s\n", printable(s.URL), printable(s.UserCode))
	n.SignIn = s.SignIn
	for {
		select {
		case <-ctx.Done():
			return api.GmailMailbox{}, ctx.Err()
		case <-time.After(time.Duration(max(s.Interval, 1)) * time.Second):
		}
		made, err := l.api.Gmail.Connect(ctx, n)
		if err != nil || made.Status != api.GmailPending {
			return made, err
		}
	}
}

// inBrowser lets the person sign in in a browser, which Google sends to a loopback
// address at the end (RFC 8252 section 7.3), or whose address the person pastes.
func (t *gmailTool) inBrowser(ctx context.Context, l *local, in api.NewGmailSignIn, n api.NewGmailMailbox) (api.GmailMailbox, error) {
	lis, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return api.GmailMailbox{}, fmt.Errorf("listen for the browser: %w", err)
	}
	defer lis.Close()
	in.RedirectURI = "http://" + lis.Addr().String() + "/"
	s, err := l.api.Gmail.SignIn(ctx, in)
	if err != nil {
		return api.GmailMailbox{}, err
	}
	u, err := url.Parse(s.URL)
	if err != nil {
		return api.GmailMailbox{}, fmt.Errorf("the server's answer has no address: %w", err)
	}
	back := make(chan url.Values, 1)
	state := u.Query().Get("state")
	arrived := func(q url.Values) bool {
		if q.Get("state") != state || state == "" { // anybody on this machine can come here
			return false
		}
		select {
		case back <- q:
		default: // it came before
		}
		return true
	}
	srv := &http.Server{ReadHeaderTimeout: 10 * time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Referrer-Policy", "no-referrer") // the address has the code
		if !arrived(r.URL.Query()) {
			http.Error(w, "This is not the answer that postern waits for.", http.StatusBadRequest)
			return
		}
		fmt.Fprintln(w, "Postern has the answer. Go back to the terminal; you can close this page.")
	})}
	go func() { _ = srv.Serve(lis) }() // until it is closed below
	defer func() {
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		_ = srv.Shutdown(stop) // the page was sent
	}()
	fmt.Fprintf(os.Stderr, "Open this address in a browser and sign in:\n\n  %s\n\nIf the browser then cannot load a page of 127.0.0.1, paste its address here:\n", printable(s.URL))
	go func() {
		for sc := bufio.NewScanner(os.Stdin); sc.Scan(); {
			if u, err := url.Parse(strings.TrimSpace(sc.Text())); err == nil && u.RawQuery != "" && !arrived(u.Query()) {
				fmt.Fprintln(os.Stderr, "That is not the address: it begins with "+in.RedirectURI)
			}
		}
	}()
	select {
	case <-ctx.Done():
		return api.GmailMailbox{}, ctx.Err()
	case <-time.After(time.Until(s.ExpiresAt)):
		return api.GmailMailbox{}, errors.New("nobody signed in in time; begin again")
	case q := <-back:
		n.SignIn, n.State, n.Code, n.Error = s.SignIn, state, q.Get("code"), q.Get("error")
		return l.api.Gmail.Connect(ctx, n)
	}
}
