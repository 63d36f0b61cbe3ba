package verification

import (
	"bufio"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	"postern/client"
	"postern/internal/audit"
	"postern/internal/guest/processpb"
)

// probe is the program that makes attempts in a sandbox.
//
//go:embed probe.py
var probe string

// A Server is the server to verify.
type Server struct {
	API      *client.Client // acts for a person who may read the audit and manage secrets and templates
	HTTP     *http.Client   // for requests to ports of sandboxes; its Timeout is ignored
	Base     string         // address of the server, such as "http://127.0.0.1:3000"
	Template string         // template of the sandboxes; empty means "base"
	ID       string         // of the verification, as in the server's log; empty if it was not announced

	Settings Settings // what its operator opened; the zero value: nothing

	Machine *Machine // the server's machine; nil if it is not this one
}

// guestPort is where the guest listens in each sandbox, on E2B's wire.
const guestPort = 49983

// A session makes the attempts of one verification.
type session struct {
	Server

	marker string // random; in the names of everything that the session creates
	box    *box   // the shared sandbox; nil until it is needed
	boxes  []*box // all sandboxes
	flood  string // ID of the run that a trial of a contract has; empty if there is none
	undo   []func(context.Context) error
}

func open(server Server) (*session, error) {
	if server.API == nil || server.HTTP == nil || server.Base == "" {
		return nil, errors.New("server: API, HTTP and Base must be set")
	}
	server.Template = cmp.Or(server.Template, "base")
	h := *server.HTTP
	h.Timeout = 0 // each attempt has a context
	server.HTTP = &h
	return &session{Server: server, marker: "verify-" + strings.ToLower(rand.Text()[:12])}, nil
}

// close removes the sandboxes, secrets and templates that the checks left, also if ctx has
// ended.
func (s *session) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	var errs []error
	for _, b := range s.boxes {
		if err := b.kill(ctx); err != nil {
			errs = append(errs, fmt.Errorf("sandbox %s is left: %w", b.id, err))
		}
	}
	for _, f := range s.undo {
		if err := f(ctx); err != nil && !errors.Is(err, client.ErrNotFound) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// A box is a disposable sandbox.
type box struct {
	s               *session
	id              string
	access, traffic string // tokens
	memoryMB        int64
	diskMB          int64
	gone            bool
}

// create starts a sandbox with a lifetime of five minutes, so that it ends even if this
// program is killed.
func (s *session) create(ctx context.Context, body map[string]any) (*box, error) {
	metadata := map[string]string{"postern.verification": s.marker}
	in := map[string]any{"templateID": s.Template, "timeout": 300}
	maps.Copy(in, body)
	if more, ok := body["metadata"].(map[string]string); ok {
		maps.Copy(metadata, more)
	}
	in["metadata"] = metadata
	var made struct {
		SandboxID          string
		EnvdAccessToken    string
		TrafficAccessToken string
	}
	if err := s.API.Call(ctx, http.MethodPost, "/sandboxes", in, &made); err != nil {
		return nil, fmt.Errorf("create a sandbox from %s: %w", s.Template, err)
	}
	b := &box{s: s, id: made.SandboxID, access: made.EnvdAccessToken, traffic: made.TrafficAccessToken}
	s.boxes = append(s.boxes, b)
	var facts struct {
		MemoryMB   int64
		DiskSizeMB int64
	}
	if err := s.API.Call(ctx, http.MethodGet, "/sandboxes/"+b.id, nil, &facts); err != nil {
		return nil, err
	}
	b.memoryMB, b.diskMB = facts.MemoryMB, facts.DiskSizeMB
	return b, nil
}

// shared returns the sandbox for checks that change nothing in it.
func (s *session) shared(ctx context.Context) (*box, error) {
	if s.box == nil || s.box.gone {
		b, err := s.create(ctx, nil)
		if err != nil {
			return nil, err
		}
		s.box = b
	}
	return s.box, nil
}

func (b *box) kill(ctx context.Context) error {
	if b.gone {
		return nil
	}
	err := b.s.API.Sandboxes.Kill(ctx, b.id)
	if err == nil || errors.Is(err, client.ErrNotFound) {
		b.gone = true
		return nil
	}
	return err
}

// Do implements [connect.HTTPClient]. It adds the sandbox's address and token to a request.
func (b *box) Do(req *http.Request) (*http.Response, error) {
	b.address(req, guestPort)
	req.Header.Set("X-Access-Token", b.access)
	return b.s.HTTP.Do(req)
}

// address names the sandbox and one of its ports in the header of a request.
func (b *box) address(req *http.Request, port int) {
	req.Header.Set("E2b-Sandbox-Id", b.id)
	req.Header.Set("E2b-Sandbox-Port", strconv.Itoa(port))
}

// maxOutput is how many bytes of a program's output are kept.
const maxOutput = 1 << 20

// run runs a program in the sandbox, and returns its standard output and its exit code: -1
// if a signal ended it. If read is not nil, it gets the output instead.
func (b *box) run(ctx context.Context, read func([]byte) error, args ...string) (stdout string, code int, err error) {
	noInput := false
	api := processpb.NewProcessClient(b, b.s.Base)
	stream, err := api.Start(ctx, connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: args[0], Args: args[1:]}, Stdin: &noInput}))
	if err != nil {
		return "", 0, err
	}
	defer stream.Close()
	var out strings.Builder
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().GetEvent().(type) {
		case *processpb.ProcessEvent_Data:
			text := e.Data.GetStdout()
			if read != nil {
				if err := read(text); err != nil {
					return "", 0, err
				}
			} else if out.Len()+len(text) <= maxOutput {
				out.Write(text)
			}
		case *processpb.ProcessEvent_End:
			if e.End.GetError() != "" && e.End.GetExitCode() <= 0 {
				return out.String(), -1, nil // by a signal
			}
			return out.String(), int(e.End.GetExitCode()), nil
		}
	}
	return out.String(), 0, cmp.Or(stream.Err(), io.ErrUnexpectedEOF)
}

// A job is an attempt that the probe makes. Which fields besides What and Kind are used
// depends on the kind, see probe.py.
type job struct {
	What     string   `json:"what"`
	Kind     string   `json:"kind"`
	Targets  any      `json:"targets,omitempty"`
	Root     bool     `json:"root,omitempty"`
	Lookup   string   `json:"lookup,omitempty"`
	Form     string   `json:"form,omitempty"`
	Hash     string   `json:"hash,omitempty"`
	Where    string   `json:"where,omitempty"`
	Below    []string `json:"below,omitempty"`
	Names    []string `json:"names,omitempty"`
	Variable string   `json:"variable,omitempty"`
}

// program returns the arguments with which the probe runs.
func program(jobs []job) ([]string, error) {
	list, err := json.Marshal(jobs)
	if err != nil {
		return nil, err
	}
	source, err := json.Marshal(probe) // an ASCII string in JSON is also one in Python
	if err != nil {
		return nil, err
	}
	return []string{"python3", "-I", "-c", "SOURCE = " + string(source) + "\nexec(SOURCE)", string(list)}, nil
}

// attempts has the probe make attempts in b.
func (b *box) attempts(ctx context.Context, jobs ...job) ([]Attempt, error) {
	args, err := program(jobs)
	if err != nil {
		return nil, err
	}
	out, code, err := b.run(ctx, nil, args...)
	if err != nil {
		if strings.Contains(err.Error(), "python3") {
			return nil, fmt.Errorf("the template has no python3, which the probe needs: %w", err)
		}
		return nil, err
	}
	made, err := parse(out)
	if err == nil && code != 0 {
		err = fmt.Errorf("the probe exited with status %d", code)
	}
	return made, err
}

// parse parses the output of the probe, which is hostile. Anything but lines of attempts is
// an error.
func parse(out string) (made []Attempt, err error) {
	lines := bufio.NewScanner(strings.NewReader(out))
	lines.Buffer(nil, maxOutput)
	for lines.Scan() {
		var a Attempt
		if err := json.Unmarshal(lines.Bytes(), &a); err != nil || a.What == "" {
			return made, fmt.Errorf("the probe printed %q", clean(lines.Text()))
		}
		switch a.Outcome {
		case Done, Refused, Silent, Absent, Broken:
		default:
			return made, fmt.Errorf("the probe printed the outcome %q", clean(string(a.Outcome)))
		}
		a.What, a.Detail = clean(a.What), clean(a.Detail)
		if len(made) > 100 {
			return made, errors.New("the probe printed more than 100 attempts")
		}
		made = append(made, a)
	}
	return made, lines.Err()
}

// get makes a GET request to a port of b as any client would, and returns the status.
func (b *box) get(ctx context.Context, port int, token string) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, b.s.Base+"/", http.NoBody)
	if err != nil {
		return 0, err
	}
	b.address(req, port)
	if token != "" {
		req.Header.Set("E2b-Traffic-Access-Token", token)
	}
	resp, err := b.s.HTTP.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10))
	return resp.StatusCode, err
}

// refusalOf names the attempt to find the wall's refusal of an address or a name.
func refusalOf(what string) string { return "the refusal of " + what + " is in the audit" }

// refusals returns, for each address or name, the attempt to find in the audit that the wall
// refused it. Without them a machine that has no network at all would pass.
func (b *box) refusals(ctx context.Context, of ...string) (made []Attempt) {
	seen := map[string]bool{}
	for e, err := range b.s.API.Audit.List(ctx, client.AuditQuery{Object: b.id, Verb: string(audit.EgressDenied), Limit: 1000}) {
		var fields audit.Fields
		if err == nil {
			err = json.Unmarshal(e.Detail, &fields)
		}
		if err != nil {
			for _, o := range of {
				made = append(made, Attempt{refusalOf(o), Broken, "read the audit: " + clean(err.Error())})
			}
			return made
		}
		seen[fields["dst"]], seen[strings.TrimSuffix(fields["name"], ".")] = true, true // names of DNS questions end with a dot
	}
	for _, o := range of {
		a := Attempt{refusalOf(o), Absent, ""}
		if seen[o] {
			a.Outcome = Done
		}
		made = append(made, a)
	}
	return made
}

func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

// canary returns a random value of the form canaryForm, so that the probe can look for it
// without knowing it.
func canary() string {
	var b [24]byte
	_, _ = rand.Read(b[:]) // never fails
	return "vfy_" + hex.EncodeToString(b[:])
}

const canaryForm = `vfy_[0-9a-f]{48}`

func escape(s string) string { return url.PathEscape(s) }
