package permit

import "context"

// SlowRead reads what holds in a project, and keeps it after meanwhile has returned.
func (r *Register) SlowRead(ctx context.Context, project string, meanwhile func()) error {
	r.mu.RLock()
	forgotten := r.forgotten
	r.mu.RUnlock()
	s, err := r.look(ctx, project)
	meanwhile()
	if err == nil {
		r.keep(project, s, forgotten)
	}
	return err
}
