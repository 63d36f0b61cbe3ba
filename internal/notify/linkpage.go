package notify

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"errors"
	"html/template"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/store"
)

//go:embed templates
var files embed.FS

// Paths are the mux patterns that [Notifier.Handler] serves.
var Paths = []string{linkPath, slackPath}

// Handler returns the page behind links, and the receiver of presses in Slack. The page
// is read-only: it shows one action to anybody who has the link, changes nothing and has
// no form. Mail servers, virus scanners and chats fetch links before people do.
func (n *Notifier) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+linkPath+"{token}", n.serveLink)
	mux.HandleFunc("GET "+linkPath+"style.css", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "public, max-age=3600")
		http.ServeContent(w, r, "style.css", time.Time{}, bytes.NewReader(n.conf.Style))
	})
	mux.HandleFunc(linkPath+"{token}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Allow", "GET, HEAD")
		n.render(w, http.StatusMethodNotAllowed, linkPage{Title: "Method not allowed", Text: "This page only shows an action. Sign in to decide."})
	})
	mux.HandleFunc("POST "+slackPath+"{room}", n.serveSlack)
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { n.render(w, http.StatusNotFound, noLink) })
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer") // the token is in the address
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		h.Set("X-Robots-Tag", "noindex, nofollow")
		mux.ServeHTTP(w, r)
	})
}

// linkPage is the data of the page.
type linkPage struct {
	Title, Text string // Text is shown instead of an action
	Action      *oversight.Action
	What        string
	View        oversight.View
	Cut         bool // the text is longer than what is shown
	Link        string
}

var noLink = linkPage{Title: "This link cannot be used", Text: "It is not valid, or its action is long over. Sign in to see what waits."}

var linkToken = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Z2-7]{26}$`) })

// maxShown is how much text the page shows, in bytes.
const maxShown = 64 << 10

// serveLink shows the action of a link. The token is looked up by its digest; the
// page shows the action only while it is pending in the version that the notice
// was about, and only if its content still matches the digest.
func (n *Notifier) serveLink(w http.ResponseWriter, r *http.Request) {
	ctx, token := r.Context(), r.PathValue("token")
	if !linkToken().MatchString(token) {
		n.render(w, http.StatusNotFound, noLink)
		return
	}
	var a oversight.Action
	var version int64
	err := n.db.View(ctx, func(tx *store.Tx) error {
		var holder, action string
		err := tx.One(ctx, `select person_id, action_id, version from notice where token = $1`, []any{digest(auth.Secret(token))}, &holder, &action, &version)
		if err != nil {
			return err
		}
		// A disabled person sees nothing any more, even with a notice that they kept.
		p, err := withoutForged(ctx, tx)(scanPerson(tx.QueryRowContext(ctx, selectPeople+`and p.id = $1`, holder).Scan))
		if err != nil {
			return err
		}
		a, err = n.gate.Find(ctx, tx, p.Principal, action)
		return err
	})
	if errors.Is(err, store.ErrNotFound) {
		n.render(w, http.StatusNotFound, noLink)
		return
	}
	if err != nil {
		n.log.ErrorContext(ctx, "look up link", "err", err)
		n.render(w, http.StatusInternalServerError, linkPage{Title: "Internal error", Text: "The server's log has the details."})
		return
	}
	l := linkPage{What: kindInWords(a), Link: "/console/actions/" + a.ID}
	if a.State != oversight.Pending || a.Version != version || !a.Expires.IsZero() && !a.Expires.After(time.Now()) {
		l.Title, l.Text = "It no longer waits", outcome(a, version)
		n.render(w, http.StatusGone, l)
		return
	}
	sum := sha256.Sum256(a.Payload)
	if l.View, err = n.gate.Show(a); err != nil || !bytes.Equal(sum[:], a.Digest) {
		l.Title, l.Text = "It cannot be shown here", "Its content cannot be displayed, or differs from what was proposed. Sign in for details."
		n.render(w, http.StatusOK, l)
		return
	}
	if len(l.View.Text) > maxShown {
		l.View.Text, l.Cut = strings.ToValidUTF8(l.View.Text[:maxShown], ""), true
	}
	l.Title, l.Action = kindInWords(a)+" waits for a decision", &a
	n.render(w, http.StatusOK, l)
}

var page = sync.OnceValue(func() *template.Template {
	return template.Must(template.New("linkpage.html").Funcs(template.FuncMap{
		"line":  func(s any) string { return mail.Printable(toString(s), 4096) },
		"lines": lines,
		"stamp": stamp,
		"size":  func(n int64) string { return strconv.FormatInt(n, 10) + " bytes" },
	}).ParseFS(files, "templates/linkpage.html"))
})

func toString(s any) string {
	if s, ok := s.(string); ok {
		return s
	}
	return ""
}

// lines makes invisible characters visible and keeps line breaks.
func lines(s string) string { return mail.PrintableLines(s, maxShown) }

// render answers with a page. The page is rendered completely before the status
// is sent, so that an error in it can still become a 500.
func (n *Notifier) render(w http.ResponseWriter, status int, l linkPage) {
	var b bytes.Buffer
	if err := page().Execute(&b, l); err != nil {
		n.log.Error("render page of a link", "err", err)
		http.Error(w, "internal error", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write(b.Bytes()) // the browser may be gone
}
