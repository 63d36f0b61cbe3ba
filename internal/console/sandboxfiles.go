package console

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/extract"
	"postern/internal/inside"
	"postern/internal/leak"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/preview"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// Limits of what the pages take out of a sandbox.
const (
	maxLook     = 8 << 20  // bytes of a file that is shown
	maxTake     = 32 << 20 // bytes of a file that is downloaded
	perFilePage = 200      // files of a directory on a page
	lookTime    = 3 * time.Second
	homeDir     = "/home/" + inside.User
)

// An inner is what a page shows of the inside of a sandbox. All of it is hostile.
type inner struct {
	Looked    bool // the viewer may look inside, and the sandbox answered
	Quiet     string
	Processes []inside.Process
	Further   bool // there are more processes
	Ports     []shownPort
	Files     []inside.Entry // the first ones in the home directory of its user
	FilesMore bool
	Home      string
}

// A shownPort is a port with the address at which others reach it.
type shownPort struct {
	inside.Port
	Address string // empty if the server has no domain
}

// lookInside adds what the guest reports, if the viewer may see it and the guest answers in time.
func (s sandboxHandlers) lookInside(ctx context.Context, who auth.Principal, v *sandboxPage) {
	v.Home = homeDir
	if !who.Decides() || !v.IsUp() || v.Bound() {
		return
	}
	// The attack: a guest never answers, so that the page with the Kill button does not load.
	ctx, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	files, more, err := s.inside.List(ctx, who, v.ID, homeDir)
	if err != nil {
		v.Quiet = insideWords(err)
		return
	}
	v.Looked = true
	v.Files, v.FilesMore = files[:min(len(files), 8)], more || len(files) > 8
	if v.Processes, v.Further, err = s.inside.Processes(ctx, who, v.ID); err != nil {
		v.Quiet = insideWords(err)
	}
	ports, err := s.inside.Ports(ctx, who, v.ID)
	if err != nil {
		v.Quiet = insideWords(err)
	}
	for _, p := range ports {
		if p.Number == sandbox.GuestPort {
			continue // the guest's own port, which nobody can use without its key
		}
		one := shownPort{Port: p}
		if s.conf.PortAddress != nil {
			one.Address = s.conf.PortAddress(v.ID, p.Number)
		}
		v.Ports = append(v.Ports, one)
	}
}

// insideWords tells a person why the inside of a sandbox is not shown.
func insideWords(err error) string {
	var refused *inside.RefusalError
	switch {
	case errors.As(err, &refused):
		return "The sandbox refuses: " + extract.Cut(refused.Text, 300)
	case errors.Is(err, sandbox.ErrBound):
		return "A contract binds this sandbox, so nobody looks or works inside."
	case errors.Is(err, inside.ErrDown):
		return "The sandbox does not run."
	case errors.Is(err, sandbox.ErrInvalid):
		return sentence(err.Error())
	}
	return "The sandbox does not answer. Its programs may keep it busy, or have replaced what answers."
}

// fileHandlers show the files of sandboxes.
type fileHandlers struct{ sandboxHandlers }

func (s fileHandlers) routes() []route {
	return []route{
		{"GET", "/console/sandboxes/{id}/files", decides, s.directory},
		{"GET", "/console/sandboxes/{id}/file", decides, s.file},
		{"GET", "/console/sandboxes/{id}/picture", decides, s.pixels},
		{"POST", "/console/sandboxes/{id}/download", decides, s.take},
	}
}

// A crumbLink is a directory in a path, with the address of its page.
type crumbLink struct{ Name, Link string }

// A directoryPage is a directory of a sandbox.
type directoryPage struct {
	listedSandbox
	Path    string
	Above   []crumbLink
	Entries []inside.Entry
	Total   int
	More    bool // there are more entries than were read
	Number  int
	Newer   string
	Older   string
	Why     string // why nothing is listed
}

// fileLink returns the address of the page that shows a file of a sandbox.
func fileLink(id, p string) string {
	return "/console/sandboxes/" + url.PathEscape(id) + "/file?path=" + url.QueryEscape(p)
}

func dirLink(id, p string) string {
	return "/console/sandboxes/" + url.PathEscape(id) + "/files?path=" + url.QueryEscape(p)
}

// above returns the directories above p, and p itself.
func above(id, p string) []crumbLink {
	out := []crumbLink{{"/", dirLink(id, "/")}}
	var at strings.Builder
	for part := range strings.SplitSeq(strings.Trim(p, "/"), "/") {
		if part != "" {
			at.WriteString("/" + part)
			out = append(out, crumbLink{part, dirLink(id, at.String())})
		}
	}
	return out
}

// askedPath returns the path that an address names. The attack: a path has "..", a line
// break, or something that the guest and the page read differently.
func askedPath(v url.Values) (string, error) {
	p := or(v.Get("path"), homeDir)
	if err := inside.CheckPath(p); err != nil {
		return "", fmt.Errorf("%w: %s", errForm, strings.TrimPrefix(err.Error(), sandbox.ErrInvalid.Error()+": "))
	}
	return p, nil
}

func (s fileHandlers) directory(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	l, err := s.find(r, who)
	if err != nil {
		return err
	}
	p, err := askedPath(r.URL.Query())
	if err != nil {
		return err
	}
	v := directoryPage{listedSandbox: l, Path: p, Above: above(l.ID, p), Number: 1}
	if n := r.URL.Query().Get("page"); n != "" {
		if v.Number, err = strconv.Atoi(n); err != nil || v.Number < 1 || v.Number > 1000 {
			return fmt.Errorf("%w: page must be a number from 1 to 1000", errForm)
		}
	}
	status := http.StatusOK
	all, more, err := s.inside.List(r.Context(), who, l.ID, p)
	if err != nil {
		v.Why, status = insideWords(err), http.StatusConflict
	}
	v.Total, v.More = len(all), more
	first := min((v.Number-1)*perFilePage, len(all))
	v.Entries = all[first:min(first+perFilePage, len(all))]
	at := func(n int) string { return dirLink(l.ID, p) + "&page=" + strconv.Itoa(n) }
	if v.Number > 1 {
		v.Newer = at(v.Number - 1)
	}
	if first+perFilePage < len(all) {
		v.Older = at(v.Number + 1)
	}
	return s.render(r.Context(), w, status, page{Name: "directory", Title: "Files of " + l.ID, Who: who, Here: "sandboxes", Body: &v})
}

// A lookPage shows a file of a sandbox.
type lookPage struct {
	listedSandbox
	Path    string
	Name    string
	Above   []crumbLink
	Size    int64
	Cut     bool
	Preview preview.File
	Text    string
	SHA256  string // of the whole file; empty if only a part was read
	Why     string
	Picture string // its address
	TooBig  bool   // too big to be downloaded here
}

func (s fileHandlers) file(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	p, err := askedPath(r.URL.Query())
	if err != nil {
		return err
	}
	return s.showFile(w, r, who, p, http.StatusOK, "")
}

// showFile shows a file, or why it cannot be shown.
func (s fileHandlers) showFile(w http.ResponseWriter, r *http.Request, who auth.Principal, p string, status int, why string) error {
	l, err := s.find(r, who)
	if err != nil {
		return err
	}
	v := lookPage{listedSandbox: l, Path: p, Name: path.Base(p), Above: above(l.ID, path.Dir(p)), Why: why, Size: -1}
	c, err := s.inside.Read(r.Context(), who, l.ID, p, maxLook)
	switch {
	case err != nil && why == "":
		v.Why, status = insideWords(err), http.StatusConflict
	case err == nil:
		if err := s.looked(r.Context(), who, l.ID, p, c); err != nil {
			return err
		}
		v.Size, v.Cut, v.TooBig = c.Size, c.More, c.Size > maxTake
		if !c.More {
			v.SHA256 = sum(c.Data)
		}
		v.Preview = preview.Of(v.Name, "", c.Data)
		switch v.Preview.Form {
		case preview.Picture:
			if !c.More {
				v.Picture = "/console/sandboxes/" + l.ID + "/picture?path=" + url.QueryEscape(p)
			}
		case preview.Text, preview.Page, preview.Table:
			// HTML is shown as its source: HTML from a sandbox is not rendered in this origin,
			// nor in a frame.
			v.Text = preview.Plain(c.Data)
		case preview.Nothing:
			// Logs have escape codes. Data without a zero byte at its beginning is read as text.
			if head := c.Data[:min(len(c.Data), 8<<10)]; len(head) > 0 && !bytes.ContainsRune(head, 0) && utf8.Valid(head[:max(0, len(head)-3)]) {
				v.Text = preview.Plain(c.Data)
			}
		case preview.Calendar, preview.PDF, preview.Message, preview.Archive:
			v.Text = v.Preview.Text
		}
		if most := 256 << 10; len(v.Text) > most {
			v.Cut, v.Text = true, strings.ToValidUTF8(v.Text[:most], "")
		}
	}
	return s.render(r.Context(), w, status, page{Name: "look", Title: "File of " + l.ID, Who: who, Here: "sandboxes", Body: &v})
}

func sum(data []byte) string {
	d := sha256.Sum256(data)
	return hex.EncodeToString(d[:])
}

// pixels answers with a picture of a sandbox, drawn anew.
func (s fileHandlers) pixels(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	l, err := s.find(r, who)
	if err != nil {
		return err
	}
	p, err := askedPath(r.URL.Query())
	if err != nil {
		return err
	}
	c, err := s.inside.Read(r.Context(), who, l.ID, p, maxLook)
	if err != nil {
		return fmt.Errorf("read a picture of %s: %w: %w", l.ID, err, errNoFile)
	}
	if c.More {
		return fmt.Errorf("read a picture of %s: it is too large: %w", l.ID, errNoFile)
	}
	if err := s.looked(r.Context(), who, l.ID, p, c); err != nil {
		return err
	}
	return s.draw(w, r, c.Data)
}

// looked records what a person is about to see. The digest is of the data that was read: the
// sandbox may change the file afterwards.
func (s fileHandlers) looked(ctx context.Context, who auth.Principal, id, p string, c inside.Content) error {
	f := audit.Fields{"path": extract.Cut(extract.Visible(p), 1000), "sha256": sum(c.Data)}
	if c.Size >= 0 {
		f["size"] = strconv.FormatInt(c.Size, 10)
	}
	if c.More {
		f["shown"] = strconv.Itoa(len(c.Data)) // only the first bytes
	}
	return s.note(ctx, who, audit.SandboxLooked, id, f)
}

// take sends a file of a sandbox to the person who requested it, so the file leaves. The
// request is that person's decision, so the rules for decisions apply: policy is asked as
// about the file of a run, with what a scan of the file found. If policy denies it, or asks
// more than one person, others, or for a second factor that is not fresh, nothing leaves. The
// record has the file, with its digest, before it leaves.
func (s fileHandlers) take(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ctx := r.Context()
	l, err := s.find(r, who)
	if err != nil {
		return err
	}
	p, err := askedPath(r.PostForm)
	if err != nil {
		return err
	}
	// The attack: many downloads at once take all memory.
	select {
	case s.drawing <- struct{}{}:
		defer func() { <-s.drawing }()
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(30 * time.Second):
		return s.showFile(w, r, who, p, http.StatusTooManyRequests, "Others download at the moment. Try again.")
	}
	c, err := s.inside.Read(ctx, who, l.ID, p, maxTake)
	if err != nil {
		return s.showFile(w, r, who, p, http.StatusConflict, insideWords(err))
	}
	if c.More {
		return s.showFile(w, r, who, p, http.StatusConflict, fmt.Sprintf("Files of more than %d MB are not downloaded here. Nothing left.", maxTake>>20))
	}
	err = s.release(ctx, who, l, p, c.Data)
	if errors.Is(err, oversight.ErrByHand) || errors.Is(err, oversight.ErrNotAsked) {
		why, _, _ := strings.Cut(err.Error(), ": "+oversight.ErrByHand.Error())
		return s.showFile(w, r, who, p, http.StatusForbidden, "Nothing left. Policy does not leave this file to you alone: "+why+". Let a run under a contract collect it, then its release is asked of those people.")
	}
	if err != nil {
		return err
	}
	return download(w, path.Base(p), c.Data)
}

// release asks policy about a file that a person takes, and records that it leaves.
func (s fileHandlers) release(ctx context.Context, who auth.Principal, l listedSandbox, p string, data []byte) error {
	name := extract.Cut(path.Base(p), 255)
	report := leak.Find(leak.Message{Files: []leak.File{{Name: name, Data: data}}})
	var flags []string
	for _, f := range report.Flags {
		flags = append(flags, string(f))
	}
	kind := http.DetectContentType(data)
	size := int64(len(data))
	req := policy.Request{
		Kind: policy.KindExport, Sandbox: l.ID, Template: l.Template, Flags: flags, Size: size,
		Files:  []policy.Attachment{{Name: name, Type: kind, Size: size}},
		Detail: map[string]string{"name": name, "type": kind, "size": strconv.FormatInt(size, 10), "path": p},
	}
	return s.db.UpdateIn(ctx, store.Thing(who.Project, l.ID), func(tx *store.Tx) error {
		if err := s.gate.ByHand(ctx, tx, who, req); err != nil {
			return err
		}
		slices.Sort(flags)
		return audit.Append(ctx, tx, who, audit.SandboxTaken, l.ID, audit.Fields{
			"path": extract.Cut(extract.Visible(p), 1000), "size": strconv.FormatInt(size, 10), "sha256": sum(data), "flags": strings.Join(flags, " "),
		})
	})
}
