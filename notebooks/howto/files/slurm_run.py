"""A run on a Slurm cluster: 4 jobs of 8 processes. pip install 'decodesim[dask]' dask-jobqueue"""

from dask_jobqueue import SLURMCluster

import sim

if __name__ == "__main__":
    with SLURMCluster(queue="cpu", cores=8, processes=8, memory="16GB", walltime="01:00:00") as cluster:
        cluster.scale(jobs=4)  # or cluster.adapt(maximum_jobs=4)
        sim.run("ppd-forms", scheduler=cluster.scheduler_address, out="runs/forms", resume=True)
