package run

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// LimitMail returns an error that wraps [oversight.ErrFull] if the contract of a
// sandbox allows no further message. The gate calls it in the transaction of each
// proposal, see [oversight.Gate.Bound], because all mail of a sandbox passes the gate.
func (s *Service) LimitMail(ctx context.Context, tx *store.Tx, who auth.Principal, kind policy.Kind) error {
	if kind != policy.KindSend {
		return nil
	}
	var name string
	err := tx.One(ctx, `select contract from sandbox where id = $1 and project_id = $2`, []any{who.ID, who.Project}, &name)
	if errors.Is(err, store.ErrNotFound) || err == nil && name == "" {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read contract of sandbox %s: %w", who.ID, err)
	}
	_, digest, _ := strings.Cut(name, "@")
	r, err := find(ctx, tx, `project_id = $1 and contract_digest = $2 order by created_at desc limit 1`, who.Project, digest)
	if err == nil && r.Contract.Digest() != digest {
		err = errors.New("the contract in the database was changed")
	}
	if err != nil { // fail closed: the limit is unknown
		return fmt.Errorf("the contract %s of sandbox %s: %w", name, who.ID, err)
	}
	most := max(r.Contract.Mail.Max, 1)
	if r.Contract.Mail.Inbox == "" {
		most = 0
	}
	var n int
	if err := tx.One(ctx, `select count(*) from action where project_id = $1 and proposer = $2 and kind = $3`, []any{who.Project, who.String(), kind}, &n); err != nil {
		return err
	}
	if n >= most {
		return fmt.Errorf("the contract %s allows %s, and %d %s proposed: %w", r.Contract.Name, number(int64(most), "message", "messages"), n, was(int64(n)), oversight.ErrFull)
	}
	return nil
}
