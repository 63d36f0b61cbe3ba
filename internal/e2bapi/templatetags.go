package e2bapi

import (
	"fmt"
	"net/http"

	"postern/internal/auth"
	"postern/internal/build"
)

// assignTags names the build that "name:tag" stands for by more tags.
func (s *Server) assignTags(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var b struct {
		Target string   `json:"target"`
		Tags   []string `json:"tags"`
	}
	if err := decode(r, &b); err != nil {
		return err
	}
	if err := checkTags(b.Tags); err != nil {
		return err
	}
	bs, err := s.builds()
	if err != nil {
		return err
	}
	to, err := bs.AssignTags(r.Context(), who, b.Target, b.Tags)
	if err != nil {
		return err
	}
	reply(w, http.StatusCreated, map[string]any{"buildID": to.ID, "tags": orEmpty(to.Tags)})
	return nil
}

// checkTags bounds how many tags a request names.
func checkTags(tags []string) error {
	if len(tags) == 0 || len(tags) > maxTags {
		return fmt.Errorf("%w: tags: want 1 to %d tags", errRequest, maxTags)
	}
	return nil
}

// removeTags removes tags of a template.
func (s *Server) removeTags(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var b struct {
		Name string   `json:"name"`
		Tags []string `json:"tags"`
	}
	if err := decode(r, &b); err != nil {
		return err
	}
	if err := checkTags(b.Tags); err != nil {
		return err
	}
	bs, err := s.builds()
	if err != nil {
		return err
	}
	if err := bs.RemoveTags(r.Context(), who, b.Name, b.Tags); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// listTags answers with the tags of a template.
func (s *Server) listTags(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	bs, err := s.builds()
	if err != nil {
		return err
	}
	tags, err := bs.Tags(r.Context(), who, r.PathValue("template"))
	if err != nil {
		return err
	}
	reply(w, http.StatusOK, each(tags, func(t build.Tag) map[string]any {
		return map[string]any{"tag": t.Tag, "buildID": t.Build, "createdAt": timeOf(t.Created)}
	}))
	return nil
}
