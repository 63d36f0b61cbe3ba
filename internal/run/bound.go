package run

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/store"
)

// Finder returns the function of [contract.NewBounds] that reads the contracts of the runs
// in db.
func Finder(db *store.DB) func(ctx context.Context, project, digest string) (*contract.Contract, error) {
	return func(ctx context.Context, project, digest string) (c *contract.Contract, err error) {
		err = db.View(ctx, func(tx *store.Tx) error {
			c, err = contractByDigest(ctx, tx, project, digest)
			return err
		})
		return c, err
	}
}

// contractByDigest returns a contract of a run or review of a project.
func contractByDigest(ctx context.Context, tx *store.Tx, project, digest string) (*contract.Contract, error) {
	r, err := find(ctx, tx, `project_id = $1 and contract_digest = $2 order by created_at desc limit 1`, project, digest)
	if err == nil && r.Contract.Digest() != digest {
		err = errors.New("the contract in the database was changed")
	}
	return r.Contract, err
}

// Bound returns an error if code in a sandbox may not propose r because of the contract
// that binds the sandbox. The gate calls it in the transaction of each proposal, see
// [oversight.Gate.Bound]: the contract is the most that a person can approve there. The
// error wraps [oversight.ErrFull] if the contract allows no further message, and
// [auth.ErrForbidden] if it does not have what is proposed.
func (s *Service) Bound(ctx context.Context, tx *store.Tx, who auth.Principal, r policy.Request) error {
	var name string
	err := tx.One(ctx, `select contract from sandbox where id = $1 and project_id = $2`, []any{who.ID, who.Project}, &name)
	if errors.Is(err, store.ErrNotFound) || err == nil && name == "" {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read contract of sandbox %s: %w", who.ID, err)
	}
	switch r.Kind { //nolint:exhaustive // the contract is asked about each other kind
	case policy.KindConnect, policy.KindRequest, policy.KindTool, policy.KindSecret, policy.KindExec:
		// The wall and the sandbox's kernel have asked the contract: what it does not have
		// is refused, and nobody is asked.
		return nil
	}
	_, digest, _ := strings.Cut(name, "@")
	c, err := contractByDigest(ctx, tx, who.Project, digest)
	if err != nil { // fail closed: what it allows is unknown
		return fmt.Errorf("the contract %s of sandbox %s: %w", name, who.ID, err)
	}
	if r.Kind == policy.KindSend {
		return limitMail(ctx, tx, who, c)
	}
	// The attack: a person approves in good faith what no contract can have, such as a
	// looser mode of the inbox, or a host that this contract does not have.
	g := contract.Grant{Kind: r.Kind, Hosts: r.To, Everyone: r.Detail["scope"] == string(permit.ForProject)}
	if v := c.Allows(g); v.Effect != policy.Allow {
		return fmt.Errorf("%s: %w", v.Reason, auth.ErrForbidden)
	}
	return nil
}

// limitMail returns an error that wraps [oversight.ErrFull] if c allows the sandbox who no
// further message. All mail of a sandbox passes the gate.
func limitMail(ctx context.Context, tx *store.Tx, who auth.Principal, c *contract.Contract) error {
	most := max(c.Mail.Max, 1)
	if c.Mail.Inbox == "" {
		most = 0
	}
	var n int
	if err := tx.One(ctx, `select count(*) from action where project_id = $1 and proposer = $2 and kind = $3`, []any{who.Project, who.String(), policy.KindSend}, &n); err != nil {
		return err
	}
	if n >= most {
		return fmt.Errorf("the contract %s allows %s, and %d %s proposed: %w", c.Name, number(int64(most), "message", "messages"), n, was(int64(n)), oversight.ErrFull)
	}
	return nil
}
