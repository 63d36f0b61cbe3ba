package mailapi

import (
	"bufio"
	"log/slog"
	"net/http"
	"time"

	"postern/internal/auth"
	"postern/internal/door"
	"postern/internal/keyring"
	"postern/internal/mailbox"
	"postern/internal/seal"
	"postern/internal/semaphore"
)

// An exportServer serves the mail of an inbox as one file.
type exportServer struct {
	access

	log   *slog.Logger
	post  *mailbox.PostOffice
	slots *semaphore.Keyed
}

func (s exportServer) routes() []route {
	return []route{
		{"GET", "/v1/inboxes/{inbox}/export", 0, s.exportInbox},
	}
}

// patientWriter sets a write deadline for each piece of a long answer: a slow
// reader is waited for, and one that has stopped reading is not.
type patientWriter struct{ w http.ResponseWriter }

func (p patientWriter) Write(b []byte) (int, error) {
	_ = http.NewResponseController(p.w).SetWriteDeadline(time.Now().Add(10 * time.Second)) // not every connection has deadlines
	return p.w.Write(b)
}

// answerTime is how long who reads a large answer may take for it.
const answerTime = 5 * time.Minute

func (s exportServer) exportInbox(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	// Before anything is written, so that a refusal has its status.
	if err := keyring.May(k, seal.Manage); err != nil || c.Kind != auth.Agent {
		if err == nil {
			_, err = s.post.Export(r.Context(), c.Principal, k, nil)
		}
		return err
	}
	done, err := s.slots.Acquire(r.Context(), k.Inbox())
	if err != nil {
		return err
	}
	defer done()
	defer door.Patient(w, answerTime)()
	door.Download(w, "application/mbox", k.Inbox()+".mbox")
	out := bufio.NewWriterSize(patientWriter{w}, 64<<10)
	_, err = s.post.Export(r.Context(), c.Principal, k, out)
	if err == nil {
		err = out.Flush()
	}
	if err != nil {
		// The status has been sent, so the connection is aborted: a partial file
		// must not look complete.
		s.log.WarnContext(r.Context(), "export inbox", "inbox", k.Inbox(), "err", err)
		panic(http.ErrAbortHandler)
	}
	return nil
}
