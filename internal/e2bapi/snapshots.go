package e2bapi

import (
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"sync"

	"postern/internal/auth"
	"postern/internal/sandbox"
)

// snapshotName is "name" or "name:tag", as in E2B.
var snapshotName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z0-9_-]{1,64}(:[a-z0-9_.-]{1,64})?$`) })

func (s *Server) createSnapshot(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var b struct {
		Name string `json:"name"`
	}
	if err := decode(r, &b); err != nil {
		return err
	}
	name := strings.TrimPrefix(b.Name, teamSlug+"/")
	if name != "" && !snapshotName().MatchString(name) {
		return fmt.Errorf("%w: name: want lower-case letters, digits, - and _, optionally followed by a colon and a tag, each at most 64 bytes", errRequest)
	}
	if name != "" && !strings.Contains(name, ":") {
		name += ":default"
	}
	n, err := s.fleet.Snapshot(r.Context(), who, shortID(r.PathValue("id")), name)
	if err != nil {
		return err
	}
	reply(w, http.StatusCreated, snapshotInfo(n))
	return nil
}

// teamSlug is the namespace of snapshot names. There is only one, the project's
// own.
const teamSlug = "default"

func snapshotInfo(n sandbox.Snapshot) map[string]any {
	if n.Name == "" {
		return map[string]any{"snapshotID": n.ID + ":default", "names": []string{}}
	}
	full := teamSlug + "/" + n.Name
	return map[string]any{"snapshotID": full, "names": []string{untagged(full)}}
}

// untagged returns a name without its tag.
func untagged(name string) string {
	name, _, _ = strings.Cut(name, ":")
	return name
}

func (s *Server) listSnapshots(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	q := r.URL.Query()
	p, err := pageOf(q)
	if err != nil {
		return err
	}
	all, err := s.fleet.Snapshots(r.Context(), who)
	if err != nil {
		return err
	}
	name := strings.TrimPrefix(q.Get("name"), teamSlug+"/")
	out := []map[string]any{}
	last := ""
	seen := map[string]bool{} // names without tag: each has one row, of its newest snapshot
	for _, n := range all {
		if q.Has("sandboxID") && n.Sandbox != shortID(q.Get("sandboxID")) ||
			name != "" && n.Name != name && untagged(n.Name) != name && n.ID != strings.TrimSuffix(name, ":default") {
			continue
		}
		if n.Name != "" {
			if seen[untagged(n.Name)] {
				continue
			}
			seen[untagged(n.Name)] = true
		}
		// Newest first, so a page continues below the cursor.
		at := cursor(n.Created, n.ID)
		if p.after != "" && at >= p.after {
			continue
		}
		if len(out) == p.limit {
			setNextToken(w, last)
			break
		}
		out, last = append(out, snapshotInfo(n)), at
	}
	reply(w, http.StatusOK, out)
	return nil
}
