"""python train.py conf=qlora"""

from trainer.__main__ import main

if __name__ == "__main__":
    main()
