package request

import (
	"context"
	"fmt"
	"slices"

	"postern/internal/inject"
	"postern/internal/policy"
	"postern/internal/store"
)

// maxPast bounds the actions that are read for [Admission.PastPlaces].
const maxPast = 2000

// A PastPlace is where the value of a secret stood in a request that people were asked
// about, and where no value goes any more.
type PastPlace struct {
	Project string
	Secret  string // its name
	Host    string
	Where   string // for a person
	Command string // that opens the place; empty if none can
}

// PastPlaces returns the places of secrets in requests that people decided on, as far
// as their content is kept, which need to be opened: each once, the newest first.
// Requests that nobody was asked about left no content behind.
func (a *Admission) PastPlaces(ctx context.Context) (out []PastPlace, err error) {
	type row struct {
		project, kind string
		payload       []byte
	}
	var rows []row
	err = a.db.View(ctx, func(tx *store.Tx) error {
		rows, err = store.List(ctx, tx, func(scan func(...any) error) (r row, err error) {
			err = scan(&r.project, &r.kind, &r.payload)
			return r, err
		}, `select project_id, kind, payload from action where kind in ($1, $2) and length(payload) > 0 order by created_at desc, id limit $3`, policy.KindRequest, policy.KindSecret, maxPast)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read former uses of secrets: %w", err)
	}
	for _, row := range rows {
		r, _, err := decodePayload(policy.Kind(row.kind), row.payload)
		if err != nil {
			continue // of a version that wrote it otherwise
		}
		var secrets []inject.Secret
		for _, u := range r.Uses {
			secrets = append(secrets, inject.Secret{ID: u.ID, Name: u.Secret, Sentinel: u.Sentinel, Hosts: []string{r.Host}})
		}
		for _, s := range inject.Find(r, secrets).Stays {
			p := PastPlace{Project: row.project, Secret: s.Secret, Host: r.Host, Where: s.Where, Command: s.Command()}
			if !slices.Contains(out, p) {
				out = append(out, p)
			}
		}
	}
	return out, nil
}
