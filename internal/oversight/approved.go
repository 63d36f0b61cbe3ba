package oversight

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"

	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/store"
)

// ApprovedBefore returns at most so many actions of a project that a person has approved
// and that were carried out, newest first: those after last in this order. For the first
// ones last is an Action with only Created. They have only ID, Project, Kind, State,
// Decider, Created and Request. The Request of a row that this program did not write has
// only its kind.
func ApprovedBefore(ctx context.Context, tx *store.Tx, project string, last *Action, most int) (out []Action, err error) {
	ids, err := tx.Strings(ctx, `select id from action where project_id = $1 and state = $2 and decider like $3 and (created_at < $4 or created_at = $4 and id > $5) order by created_at desc, id limit $6`,
		project, Done, string(auth.Person)+":%", store.Time(last.Created), last.ID, most)
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	args := make([]any, len(ids))
	for i, id := range ids {
		args[i] = id
	}
	rows, err := tx.Rows(ctx, sealedActions(), false, `id in (`+store.Places(1, len(ids))+`)`, args...)
	if err != nil {
		return nil, err
	}
	for _, row := range rows {
		text := func(column string) string { s, _ := row.Values[column].(string); return s }
		created, _ := row.Values["created_at"].(int64)
		a := Action{ID: text("id"), Project: project, Kind: policy.Kind(text("kind")), State: State(text("state")), Decider: text("decider"), Created: store.FromTime(created)}
		if !row.Holds || json.Unmarshal([]byte(text("request")), &a.Request) != nil {
			a.Request = policy.Request{} // the action stays in the list, so that the caller can continue after it
		}
		a.Request.Kind = a.Kind
		out = append(out, a)
	}
	slices.SortFunc(out, func(a, b Action) int { return cmp.Or(b.Created.Compare(a.Created), cmp.Compare(a.ID, b.ID)) })
	return out, nil
}
